/* The functions that the library exports, and nothing else of it is visible.
 *
 * Each returns a CUDA runtime error code, 0 = success. They launch or call the runtime once and
 * return: nothing is validated, allocated or waited for, but where the name says so. The last
 * argument is a stream; NULL is the legacy default stream. An empty call (no tokens, no blocks)
 * launches nothing.
 *
 * geometry: host memory of pc_cuda_geometry_nbytes() bytes that pc_cuda_geometry() has filled; it
 * is copied into the launch. Pointers are to device memory unless the comment says host. A slab is
 * a base address and the bytes from block to block, of any sign; `slabs` is a device array of
 * {uint64 base, int64 block_stride}, all of the one geometry. Strides of rows are in bytes, of any
 * sign; dtype: 0 float32, 1 float16, 2 bfloat16.
 *
 * Blocks that wait to be quantised are kept open, in slabs of their own, in a float format
 * (space.h). Their geometry is clamped; their slabs' base addresses are moved down by num_blocks
 * blocks, so that places name their blocks: every id below may be a place. Which kind of place it
 * is, is the caller's to know: a call is about one kind, but for pc_cuda_convert() and
 * pc_cuda_build_pointers().
 *
 * Python reads the names and the number of arguments from here in a test; count PC_CUDA_ABI up
 * whenever a signature or a meaning changes.
 */
#ifndef PAGEDCACHE_CUDA_ABI_H
#define PAGEDCACHE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "abi_attention.h"

#define PC_CUDA_ABI 4

#ifdef __cplusplus
#define PC_CUDA_API extern "C" __attribute__((visibility("default")))
#else
#define PC_CUDA_API extern __attribute__((visibility("default")))
#endif

/* ---- the library, the runtime -------------------------------------------------------------- */

PC_CUDA_API int pc_cuda_abi(void); /* PC_CUDA_ABI, not an error code */

/* Name ("cudaErrorInvalidValue") and sentence of an error code; never NULL. */
PC_CUDA_API const char *pc_cuda_error_name(int error);
PC_CUDA_API const char *pc_cuda_error_text(int error);

PC_CUDA_API int pc_cuda_device_count(int *count); /* host; 35 where there is no driver */

PC_CUDA_API size_t pc_cuda_geometry_nbytes(void); /* bytes, not an error code */

/* Fill a geometry (host); cudaErrorInvalidValue where pc_geometry_check() refuses. */
PC_CUDA_API int pc_cuda_geometry(void *geometry, int code, int layout, int64_t num_heads,
                                 int64_t block_size, int64_t head_dim);

/* Make a geometry (host) that of open blocks: see pc_geometry_clamp(). */
PC_CUDA_API int pc_cuda_clamp(void *geometry);

/* Copy between any two of pinned host, device and managed memory; set bytes. */
PC_CUDA_API int pc_cuda_copy(void *dst, const void *src, size_t nbytes, void *stream);
PC_CUDA_API int pc_cuda_fill(void *dst, int byte, size_t nbytes, void *stream);

/* Events without times. The wait is the stream's, on the device; the synchronising ones are the
 * host's. */
PC_CUDA_API int pc_cuda_event_create(void **event);
PC_CUDA_API int pc_cuda_event_destroy(void *event);
PC_CUDA_API int pc_cuda_event_record(void *event, void *stream);
PC_CUDA_API int pc_cuda_event_synchronize(void *event);
PC_CUDA_API int pc_cuda_stream_wait(void *event, void *stream);
PC_CUDA_API int pc_cuda_stream_synchronize(void *stream);

/* *capturing (host) = 1 while what is queued on the stream is recorded as a graph. */
PC_CUDA_API int pc_cuda_stream_capturing(int *capturing, void *stream);

/* What memory an address is: *kind (host) = 0 unknown to CUDA, 1 pinned host, 2 device, 3 managed;
 * *device (host) = ordinal, where it has one. */
PC_CUDA_API int pc_cuda_pointer(int *kind, int *device, const void *address);

/* ---- rows ------------------------------------------------------------------------------------ */

/* Store row [token][head] of `rows` at slots[token] (int64, block * block_size + offset): the same
 * bytes as pc_store_rows() of rows.h. Slot -1: the token is skipped. A slot outside -1 …
 * num_blocks * block_size - 1, or under policy PC_NONFINITE_RAISE a group with NaN or Inf for a
 * quantised format, is skipped too, and the first one is reported in fault (int64[2], or NULL)
 * unless fault[0] is set already: {PC_E_RANGE, slot} or {PC_E_NONFINITE, flat index of the value}.
 * cudaErrorInvalidValue for a format whose groups run along the tokens. */
PC_CUDA_API int pc_cuda_store(const void *geometry, void *slab, int64_t block_stride,
                              int64_t num_blocks, const void *rows, int64_t token_stride,
                              int64_t head_stride, int64_t value_stride, int dtype,
                              const int64_t *slots, int64_t num_tokens, int policy, void *fault,
                              void *stream);

/* Store whole blocks of a format whose groups run along the tokens: entries is int64 [n][2], each
 * {first of block_size rows, block}; the same bytes as pc_put_block() of rows.h. num_tokens: of
 * rows. An entry outside of rows or slab is skipped, as are two channels with NaN or Inf under
 * PC_NONFINITE_RAISE; fault as above ({PC_E_RANGE, block}). */
PC_CUDA_API int pc_cuda_store_blocks(const void *geometry, void *slab, int64_t block_stride,
                                     int64_t num_blocks, const void *rows, int64_t token_stride,
                                     int64_t head_stride, int64_t value_stride, int dtype,
                                     int64_t num_tokens, const int64_t *entries, int64_t n,
                                     int policy, void *fault, void *stream);

/* Read num_tokens tokens into rows, as pc_load_rows() does: token i is token first + i of the
 * blocks listed. The blocks are block_pointers[…] (address of each) or, where that is NULL,
 * slab + block_ids[…] * block_stride. Every block listed in the range must exist. */
PC_CUDA_API int pc_cuda_load(const void *geometry, const void *slab, int64_t block_stride,
                             const int32_t *block_ids, const uint64_t *block_pointers,
                             int64_t first, void *rows, int64_t token_stride, int64_t head_stride,
                             int64_t value_stride, int dtype, int64_t num_tokens, void *stream);

/* *first = flat index ((token * num_heads + head) * head_dim + value) of the first NaN or Inf of
 * rows, or UINT64_MAX. */
PC_CUDA_API int pc_cuda_find_nonfinite(const void *rows, int64_t token_stride, int64_t head_stride,
                                       int64_t value_stride, int dtype, int64_t num_tokens,
                                       int64_t num_heads, int64_t head_dim, uint64_t *first,
                                       void *stream);

/* ---- attention ------------------------------------------------------------------------------- */

/* sizes (host): bytes of pc_cuda_attention, of pc_cuda_attention_item, and of the partial results
 * of one part and KV head. */
PC_CUDA_API int pc_cuda_attend_sizes(int64_t head_dim, size_t *sizes);

/* out = softmax(scale * q · k) · v for the items of a call (host), whose parts are added up by the
 * CTA that is last: one launch. Everything the call points to is read when the kernel runs, so that
 * a graph may be replayed with other items, places and queries. Head dimensions above 256 are
 * refused (cudaErrorInvalidValue). */
PC_CUDA_API int pc_cuda_attend(const pc_cuda_attention *call, void *stream);

/* *sum = the sum of nbytes / 8 words of 64 bits (nbytes and from: multiples of 16), modulo 2^64: a
 * plain read, to measure others by. */
PC_CUDA_API int pc_cuda_read(const void *from, size_t nbytes, uint64_t *sum, void *stream);

/* ---- blocks, in all slabs by one launch ------------------------------------------------------ */

/* Pair i copies the first rows[i] token rows of block src[i] to dst[i]; rows[i] == block_size
 * copies every byte of the block, padding too. in_order = 0 is a promise that no dst is another
 * pair's src or dst; 1 copies as if one pair after the other. */
PC_CUDA_API int pc_cuda_copy_blocks(const void *geometry, const void *slabs, int num_slabs,
                                    const int32_t *src, const int32_t *dst, const int32_t *rows,
                                    int64_t n, int in_order, void *stream);

/* Copy single tokens, slot to slot, as if one after the other: their quants and scales alone. */
PC_CUDA_API int pc_cuda_copy_tokens(const void *geometry, const void *slabs, int num_slabs,
                                    const int64_t *src, const int64_t *dst, int64_t n,
                                    void *stream);

/* Copy rows between the two kinds of places: pair i is rows[i] <= most_rows token rows from slot
 * src[i] on to slot dst[i] on, all in one block at either end. NaN and Inf are saturated. No row is
 * written by two pairs. One geometry is a float format's, the other quantised (whole blocks only
 * where its groups run along the tokens), or both are the same float format. In float slabs every
 * row lies at a multiple of 16 bytes, or of the largest power of 2 that divides its bytes. */
PC_CUDA_API int pc_cuda_convert(const void *from_geometry, const void *from_slabs,
                                const void *to_geometry, const void *to_slabs, int num_slabs,
                                const int64_t *src, const int64_t *dst, const int32_t *rows,
                                int64_t n, int64_t most_rows, void *stream);

/* Move whole blocks, moves[m][2] of (src, dst), as if one after the other; id -1 is a scratch block
 * that exists for this call and starts as zeros. */
PC_CUDA_API int pc_cuda_move_blocks(const void *geometry, const void *slabs, int num_slabs,
                                    const int32_t *moves, int64_t m, void *stream);

/* Set every byte of whole blocks. */
PC_CUDA_API int pc_cuda_fill_blocks(const void *geometry, const void *slabs, int num_slabs,
                                    const int32_t *ids, int64_t n, int byte, void *stream);

/* table[layer][2][capacity]: entries first … first + count - 1 of K and of V become the addresses
 * of places[0 … count - 1] in the layer's slabs, from num_blocks on in the open ones; 0 for a
 * negative place. The open slabs are read (any that exist will do where there is no open place). */
PC_CUDA_API int pc_cuda_build_pointers(const void *k_slabs, const void *v_slabs,
                                       const void *open_k_slabs, const void *open_v_slabs,
                                       int64_t num_blocks, int num_layers, const int32_t *places,
                                       int64_t first, int64_t count, uint64_t *table,
                                       int64_t capacity, void *stream);

#endif
