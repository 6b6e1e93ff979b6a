/* The operations of pack.h for every compiler with vector types; pack_avx512.h says what they do.
 */
#if defined(PC_ISA) && PC_WIDTH == 4

typedef uint16_t V(words) __attribute__((vector_size(8)));

/* pc_float_to_half of numbers, in the low half of every lane. */
PC_VECTOR vi V(half_bits)(vf x) {
    const vi bits = V(as_bits)(x), magnitude = bits & 0x7FFFFFFFu;
    const vi normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    const vi subnormal = V(as_bits)(V(as_float)(magnitude) + V(all)(0.5f)) - 0x3F000000u;
    const vi is_normal = (vi)((pc_4i)magnitude >= 0x38800000);
    const vi overflows = (vi)((pc_4i)magnitude >= 0x47800000);
    const vi finite = (normal & is_normal) | (subnormal & ~is_normal);
    return ((bits >> 16) & 0x8000u) | (finite & ~overflows) | (overflows & 0x7C00u);
}

PC_VECTOR V(words) V(low_words)(vi x) {
    V(words) words;
#if PC_ON_X86
    /* signed words are kept as they are; there is no instruction for others */
    const __m128i wide = _mm_srai_epi32(_mm_slli_epi32((__m128i)x, 16), 16);
    const __m128i narrow = _mm_packs_epi32(wide, wide);
    memcpy(&words, &narrow, sizeof words);
#else
    for (int i = 0; i < 4; i++) {
        words[i] = (uint16_t)x[i];
    }
#endif
    return words;
}

PC_VECTOR V(words) V(half_words)(vf x) {
    return V(low_words)(V(half_bits)(x));
}

PC_VECTOR void V(put_words)(const vi *x, uint8_t *to) {
    for (int i = 0; i < V(per_group); i++) {
        const V(words) words = V(low_words)(x[i]);
        memcpy(to + 8 * i, &words, 8);
    }
}

PC_VECTOR void V(put_halves)(const vf *x, uint8_t *to) {
    for (int i = 0; i < V(per_group); i++) {
        const V(words) words = V(half_words)(x[i]);
        memcpy(to + 8 * i, &words, 8);
    }
}

PC_VECTOR void V(put_four_halves)(pc_4f x, uint8_t *to) {
    const V(words) words = V(half_words)(x);
    memcpy(to, &words, 8);
}

/* The low 8 bits of four lanes, which have nothing else but a sign. */
PC_VECTOR uint32_t V(four_bytes)(vi x) {
    const vi low = x & 0xFFu;
#if PC_ON_X86
    const __m128i words = _mm_packs_epi32((__m128i)low, (__m128i)low);
    return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(words, words));
#else
    return low[0] | low[1] << 8 | low[2] << 16 | low[3] << 24;
#endif
}

PC_VECTOR void V(put_bytes)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        for (int i = 0; i < V(per_group); i++) {
            const uint32_t bytes = V(four_bytes)(x[g * V(per_group) + i]);
            memcpy(to + g * step + 4 * i, &bytes, 4);
        }
    }
}

PC_VECTOR void V(put_pairs)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        for (int i = 0; i < V(per_group); i++) {
            const uint32_t bytes = V(four_bytes)(x[g * V(per_group) + i]);
            const uint32_t pairs = bytes | bytes >> 4; /* of nibbles, in bytes 0 and 2 */
            const uint16_t both = (uint16_t)((pairs & 0xFFu) | (pairs >> 8 & 0xFF00u));
            memcpy(to + g * step + 2 * i, &both, 2);
        }
    }
}

PC_VECTOR void V(put_split)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        for (int i = 0; i < V(per_group) / 2; i++) {
            const vi *const low = x + g * V(per_group) + i;
            const uint32_t bytes = V(four_bytes)(low[0] | low[V(per_group) / 2] << 4);
            memcpy(to + g * step + 4 * i, &bytes, 4);
        }
    }
}

PC_VECTOR void V(get_pairs)(const uint8_t *from, vi *x) {
    for (int i = 0; i < V(per_group); i++) {
        const uint32_t low = from[2 * i], high = from[2 * i + 1];
        const vi wide = {low & 15, low >> 4, high & 15, high >> 4};
        x[i] = wide;
    }
}

PC_VECTOR void V(get_split)(const uint8_t *from, vi *x) {
    for (int i = 0; i < V(per_group) / 2; i++) {
        const vi wide = {from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]};
        x[i] = wide & 15u;
        x[i + V(per_group) / 2] = wide >> 4;
    }
}

PC_VECTOR vf V(to_floats)(vi x) {
    return __builtin_convertvector((pc_4i)x, vf);
}

PC_VECTOR vf V(all_half)(const uint8_t *from) {
    return V(all)(pc_load_half(from));
}

PC_VECTOR vf V(min)(vf a, vf b) {
    const vi below = V(below)(a, b);
    return V(as_float)((below & V(as_bits)(a)) | (~below & V(as_bits)(b)));
}

PC_VECTOR vf V(with_sign)(vf x, float magnitude) {
    return V(as_float)((V(as_bits)(x) & 0x80000000u) | V(as_bits)(V(all)(magnitude)));
}

PC_VECTOR vi V(cut)(vf x) {
    return (vi) __builtin_convertvector(x, pc_4i);
}

PC_VECTOR int V(any_nan)(vf a, vf b) {
    const pc_4i number = (pc_4i)((a == a) & (b == b));
    return !V(every)((vi)number);
}

PC_VECTOR vi V(higher)(vi a, vi b) {
    const vi more = (vi)((pc_4i)a > (pc_4i)b);
    return (more & a) | (~more & b);
}

PC_VECTOR vi V(lower)(vi a, vi b) {
    const vi more = (vi)((pc_4i)a > (pc_4i)b);
    return (more & b) | (~more & a);
}

PC_VECTOR vi V(greater)(const int floats, vi a, vi b) {
    return floats ? V(as_bits)(V(max)(V(as_float)(a), V(as_float)(b))) : V(higher)(a, b);
}

PC_VECTOR pc_4i V(highest_of_each)(const int floats, const vi *v) {
    const vi a = v[0], b = v[1], c = v[2], d = v[3];
    const vi first = {a[0], b[0], c[0], d[0]}, second = {a[1], b[1], c[1], d[1]};
    const vi third = {a[2], b[2], c[2], d[2]}, fourth = {a[3], b[3], c[3], d[3]};
    return (pc_4i)V(greater)(floats, V(greater)(floats, first, second),
                             V(greater)(floats, third, fourth));
}

#endif
