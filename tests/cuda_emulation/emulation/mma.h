/* The product of two small matrices that a warp's tensor cores make, under a name of our own: CUDA
 * has it as PTX only (mma.sync.m16n8k8 of tf32). */
#pragma once

#include "warp.h"

#include <math.h>

namespace pc_emulation {

struct Fragments {
    float a[4], b[2];
};

// What tensor cores see of a float: its upper 19 bits.
inline float as_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= 0xffffe000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Lanes that go on early come back with the next fragments before the last one has looked at these,
 * but not with those after the next. */
inline Fragments fragments[2][32][2][32]; // side, warp, turn, lane

} // namespace pc_emulation

/* c[16][8] += a[16][8] * b[8][8]. Lane 4 g + t holds a[g][t], a[g + 8][t], a[g][t + 4],
 * a[g + 8][t + 4]; b[t][g], b[t + 4][g]; c[g][2 t], c[g][2 t + 1], c[g + 8][2 t], c[g + 8][2 t +
 * 1].
 */
inline void pc_emulated_mma(float (&c)[4], const float (&a)[4], const float (&b)[2], PC_HERE) {
    using namespace pc_emulation;
    const Fragments(*held)[32];
    unsigned lane, turn;
    {
        Unwatched unwatched;
        Thread &self = *machine.current;
        lane = self.lane();
        turn = self.products++ % 2;
        auto &warp = fragments[machine.side == &machine.sides[1]][self.number / 32];
        for (int i = 0; i < 4; i++)
            warp[turn][lane].a[i] = as_tf32(a[i]);
        for (int i = 0; i < 2; i++)
            warp[turn][lane].b[i] = as_tf32(b[i]);
        held = &warp[turn];
    }
    wait_for_warp(WarpOperation::multiply, ~0u, 0, lane, file, line);
    Unwatched unwatched;
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = c[i];
        for (unsigned k = 0; k < 8; k++) {
            const Fragments &left = (*held)[row % 8 * 4 + k % 4];
            const Fragments &right = (*held)[column * 4 + k % 4];
            sum = fmaf(left.a[row / 8 + k / 4 * 2], right.b[k / 4], sum);
        }
        c[i] = sum;
    }
}
