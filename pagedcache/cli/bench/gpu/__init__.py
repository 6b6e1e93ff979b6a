"""The benchmark on a GPU: the same operations on device arrays, timed by the device's own clock."""
