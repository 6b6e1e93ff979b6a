# cython: language_level=3
"""DLPack for native code: capsules made and read, and when what is behind them may go.

A capsule owns its tensor until somebody takes it by renaming the capsule. From then on the
reader's call of the deleter gives the owner back; a capsule that nobody took does it by itself.
The deleter may be called by any thread, with or without the GIL. Which dtypes and devices there
are, and who may have what, is for :mod:`pagedcache.dlpack` to know.

The structures are those of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
"""
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

cdef extern from "Python.h":
    int Py_IsInitialized() nogil
    void Py_DecRef(PyObject *o)
    object PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *) noexcept)
    bint PyCapsule_IsValid(PyObject *capsule, const char *name)
    void *PyCapsule_GetPointer(PyObject *capsule, const char *name)
    int PyCapsule_SetName(object capsule, const char *name) except -1

cdef struct dl_tensor:
    void *data
    int32_t device_kind
    int32_t device_index
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct dl_managed:
    dl_tensor tensor
    void *context
    void (*deleter)(dl_managed *) noexcept nogil

cdef struct dl_managed_versioned:
    uint32_t major
    uint32_t minor
    void *context
    void (*deleter)(dl_managed_versioned *) noexcept nogil
    uint64_t flags
    dl_tensor tensor

cdef struct export_t:  # one allocation: either form of the tensor, its owner, shape and strides
    dl_managed plain
    dl_managed_versioned versioned
    PyObject *owner

cdef enum:
    READ_ONLY = 1
    IS_COPIED = 2
    MAX_NDIM = 64

cdef const char *PLAIN = "dltensor"
cdef const char *VERSIONED = "dltensor_versioned"
# A capsule keeps the pointer to its name: these live as long as the module's code.
cdef const char *USED_PLAIN = "used_dltensor"
cdef const char *USED_VERSIONED = "used_dltensor_versioned"


cdef void give_back(export_t *export) noexcept nogil:
    if Py_IsInitialized():  # a reader may outlive the interpreter; the owner is gone with it
        with gil:
            Py_DecRef(export.owner)
    free(export)


cdef void delete_plain(dl_managed *managed) noexcept nogil:
    give_back(<export_t *> managed.context)


cdef void delete_versioned(dl_managed_versioned *managed) noexcept nogil:
    give_back(<export_t *> managed.context)


cdef void forget_plain(PyObject *capsule) noexcept:
    """Destructor of a capsule: nothing is left to do once a reader has renamed it."""
    cdef dl_managed *managed
    if PyCapsule_IsValid(capsule, PLAIN):
        managed = <dl_managed *> PyCapsule_GetPointer(capsule, PLAIN)
        managed.deleter(managed)


cdef void forget_versioned(PyObject *capsule) noexcept:
    cdef dl_managed_versioned *managed
    if PyCapsule_IsValid(capsule, VERSIONED):
        managed = <dl_managed_versioned *> PyCapsule_GetPointer(capsule, VERSIONED)
        managed.deleter(managed)


def make_capsule(object owner, uintptr_t address, tuple shape, tuple strides, tuple dtype,
                 tuple device, bint versioned, bint readonly=False, bint copied=False):
    """A new capsule over the memory at ``address``, which ``owner`` keeps alive.

    ``strides`` count elements; ``dtype`` is (code, bits), ``device`` (kind, index), as DLPack
    numbers them. ``versioned``: the form of DLPack 1.0, the only one that can say ``readonly``
    and ``copied``. Raises BufferError and MemoryError.
    """
    cdef int32_t ndim = <int32_t> len(shape)
    cdef int64_t size = 1
    cdef int64_t *extents
    cdef dl_tensor *tensor
    cdef export_t *export
    cdef uint8_t code = dtype[0], bits = dtype[1]
    cdef int32_t kind = device[0], index = device[1]
    if ndim != len(strides) or ndim > MAX_NDIM:
        raise BufferError(f"shape {shape} and strides {strides} are not one array's")
    if readonly and not versioned:
        raise BufferError("the array is read-only, which DLPack says from version 1.0 on")
    export = <export_t *> malloc(sizeof(export_t) + 2 * ndim * sizeof(int64_t))
    if export == NULL:
        raise MemoryError
    extents = <int64_t *> (export + 1)
    try:
        for i in range(ndim):
            extents[i] = shape[i]
            extents[ndim + i] = strides[i]
            size = 0 if extents[i] == 0 else size
    except BaseException:
        free(export)
        raise
    tensor = &export.versioned.tensor if versioned else &export.plain.tensor
    tensor.data = <void *> address if size else NULL
    tensor.device_kind, tensor.device_index = kind, index
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = ndim, code, bits, 1
    tensor.shape, tensor.strides, tensor.byte_offset = extents, extents + ndim, 0
    export.owner = <PyObject *> owner
    Py_INCREF(owner)
    try:
        if versioned:
            export.versioned.major, export.versioned.minor = 1, 0
            export.versioned.context, export.versioned.deleter = export, delete_versioned
            export.versioned.flags = (READ_ONLY if readonly else 0) | (IS_COPIED if copied else 0)
            return PyCapsule_New(&export.versioned, VERSIONED, forget_versioned)
        export.plain.context, export.plain.deleter = export, delete_plain
        return PyCapsule_New(&export.plain, PLAIN, forget_plain)
    except BaseException:
        give_back(export)
        raise


cdef class Borrowed:
    """Another library's array, taken out of its capsule and given back when this object goes.

    ``address``: of the first element. ``strides``: in elements, or None where they are dense.
    ``dtype``: (code, bits, lanes), ``device``: (kind, index), as DLPack numbers them.
    ``readonly``: whether the memory must not be written to. Before DLPack 1.0 capsules could not
    say so, and read-only arrays were not to be given out.

    Raises BufferError, and leaves the capsule to itself, for what is no capsule of DLPack, for
    one that was taken already, and for a version that does not exist yet.
    """

    cdef dl_managed *plain
    cdef dl_managed_versioned *versioned
    cdef readonly uintptr_t address
    cdef readonly tuple shape
    cdef readonly object strides
    cdef readonly tuple dtype
    cdef readonly tuple device
    cdef readonly bint readonly

    def __cinit__(self, object capsule):
        cdef PyObject *given = <PyObject *> capsule
        cdef dl_managed_versioned *versioned = NULL
        cdef dl_managed *plain = NULL
        cdef dl_tensor *tensor
        if PyCapsule_IsValid(given, VERSIONED):
            versioned = <dl_managed_versioned *> PyCapsule_GetPointer(given, VERSIONED)
            if versioned.major != 1:  # all behind the flags may lie elsewhere
                raise BufferError(f"DLPack 1.x is read, got {versioned.major}.{versioned.minor}")
            self.readonly = versioned.flags & READ_ONLY
            tensor = &versioned.tensor
        elif PyCapsule_IsValid(given, PLAIN):
            plain = <dl_managed *> PyCapsule_GetPointer(given, PLAIN)
            tensor = &plain.tensor
        else:
            raise BufferError(f"a capsule of DLPack that nobody took, got {capsule!r}")
        self.describe(tensor)
        PyCapsule_SetName(capsule, USED_VERSIONED if versioned else USED_PLAIN)
        self.versioned, self.plain = versioned, plain

    cdef int describe(self, dl_tensor *tensor) except -1:
        cdef int32_t i, ndim = tensor.ndim
        if not 0 <= ndim <= MAX_NDIM or (ndim and tensor.shape == NULL):
            raise BufferError(f"an array of 0…{MAX_NDIM} axes, got {ndim}")
        self.address = <uintptr_t> tensor.data + tensor.byte_offset
        self.shape = tuple([tensor.shape[i] for i in range(ndim)])
        self.strides = (
            None if tensor.strides == NULL else tuple([tensor.strides[i] for i in range(ndim)])
        )
        self.dtype = tensor.code, tensor.bits, tensor.lanes
        self.device = tensor.device_kind, tensor.device_index
        return 0

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.plain != NULL and self.plain.deleter != NULL:
            self.plain.deleter(self.plain)
