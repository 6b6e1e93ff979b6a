/* From the number of a strip of work to (token, head, unit in the row), in the order in which rows
 * lie in storage: neighbouring threads then touch neighbouring bytes of a block.
 *
 * HND: head by head, and the tokens of a head one after the other; NHD: token by token.
 *
 * A strip is what one thread does of a row: a unit, and perhaps others as many units behind it as a
 * row has strips. Where the row lies is worked out once for all of them, which takes longer than
 * their copies.
 */
#ifndef PAGEDCACHE_CUDA_WALK_H
#define PAGEDCACHE_CUDA_WALK_H

#include "divide.h"
#include "pagedcache/rows.h"

struct pc_walk {
    pc_divisor strips; /* in a row */
    pc_divisor inner;  /* tokens (HND) or heads (NHD) */
    int64_t units;     /* in a row */
    int64_t total;     /* strips */
    int by_head;
};

struct pc_spot {
    int64_t token, head, unit; /* the strip's first */
};

/* per_strip: units of a strip at most. */
inline pc_walk pc_make_walk(int by_head, int64_t num_tokens, int64_t num_heads,
                            int64_t units_per_row, int per_strip) {
    const int64_t strips = (units_per_row + per_strip - 1) / per_strip;
    pc_walk walk;
    walk.strips = pc_make_divisor(strips);
    walk.inner = pc_make_divisor(by_head ? num_tokens : num_heads);
    walk.units = units_per_row;
    walk.total = num_tokens * num_heads * strips;
    walk.by_head = by_head;
    return walk;
}

PC_DEVICE pc_spot pc_spot_of(const pc_walk &walk, int64_t index) {
    const int64_t row = pc_divide(index, walk.strips);
    const int64_t outer = pc_divide(row, walk.inner);
    const int64_t inner = row - outer * walk.inner.divisor;
    pc_spot spot;
    spot.token = walk.by_head ? inner : outer;
    spot.head = walk.by_head ? outer : inner;
    spot.unit = index - row * walk.strips.divisor;
    return spot;
}

/* Unit number i of a strip; there is none from walk.units on. */
PC_DEVICE int64_t pc_unit_of(const pc_walk &walk, const pc_spot &spot, int i) {
    return spot.unit + i * walk.strips.divisor;
}

/* First byte of the row outside the pool. */
PC_DEVICE uint8_t *pc_outside_row(const pc_rows &rows, const pc_spot &spot) {
    PC_ASSUME_GLOBAL(rows.base);
    return rows.base + spot.token * rows.token_stride + spot.head * rows.head_stride;
}

#endif
