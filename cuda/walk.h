/* From the number of a unit of work to (token, head, unit in the row), in the order in which the
 * units lie in storage: neighbouring threads then touch neighbouring bytes of a block.
 *
 * HND: head by head, and the tokens of a head one after the other; NHD: token by token.
 */
#ifndef PAGEDCACHE_CUDA_WALK_H
#define PAGEDCACHE_CUDA_WALK_H

#include "divide.h"
#include "pagedcache/rows.h"

struct pc_walk {
    pc_divisor units; /* in a row */
    pc_divisor inner; /* tokens (HND) or heads (NHD) */
    int64_t total;
    int by_head;
};

struct pc_spot {
    int64_t token, head, unit;
};

inline pc_walk pc_make_walk(int by_head, int64_t num_tokens, int64_t num_heads,
                            int64_t units_per_row) {
    pc_walk walk;
    walk.units = pc_make_divisor(units_per_row);
    walk.inner = pc_make_divisor(by_head ? num_tokens : num_heads);
    walk.total = num_tokens * num_heads * units_per_row;
    walk.by_head = by_head;
    return walk;
}

PC_DEVICE pc_spot pc_spot_of(const pc_walk &walk, int64_t index) {
    const int64_t row = pc_divide(index, walk.units);
    const int64_t outer = pc_divide(row, walk.inner);
    const int64_t inner = row - outer * walk.inner.divisor;
    pc_spot spot;
    spot.token = walk.by_head ? inner : outer;
    spot.head = walk.by_head ? outer : inner;
    spot.unit = index - row * walk.units.divisor;
    return spot;
}

/* First byte of the row outside the pool. */
PC_DEVICE uint8_t *pc_outside_row(const pc_rows &rows, const pc_spot &spot) {
    PC_ASSUME_GLOBAL(rows.base);
    return rows.base + spot.token * rows.token_stride + spot.head * rows.head_stride;
}

#endif
