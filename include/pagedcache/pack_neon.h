/* The operations of pack.h with NEON on 64-bit machines; pack_avx512.h says what they do. */
#if defined(PC_ISA) && PC_WIDTH == 4

/* The low words of eight lanes. */
PC_VECTOR uint16x8_t V(words_of)(const vi *x) {
    return vuzp1q_u16(vreinterpretq_u16_u32((uint32x4_t)x[0]),
                      vreinterpretq_u16_u32((uint32x4_t)x[1]));
}

/* The low bytes of 16 lanes. */
PC_VECTOR uint8x16_t V(bytes_of)(const vi *x) {
    return vuzp1q_u8(vreinterpretq_u8_u16(V(words_of)(x)),
                     vreinterpretq_u8_u16(V(words_of)(x + 2)));
}

PC_VECTOR void V(put_halves)(const vf *x, uint8_t *to) {
    for (int i = 0; i < V(per_group); i += 2) {
        const float16x8_t halves =
            vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)x[i]), (float32x4_t)x[i + 1]);
        memcpy(to + 8 * i, &halves, sizeof halves);
    }
}

PC_VECTOR void V(put_four_halves)(pc_4f x, uint8_t *to) {
    const float16x4_t halves = vcvt_f16_f32((float32x4_t)x);
    memcpy(to, &halves, sizeof halves);
}

PC_VECTOR void V(put_words)(const vi *x, uint8_t *to) {
    for (int i = 0; i < V(per_group); i += 2) {
        const uint16x8_t words = V(words_of)(x + i);
        memcpy(to + 8 * i, &words, sizeof words);
    }
}

PC_VECTOR void V(put_bytes)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        vst1q_u8(to + g * step, V(bytes_of)(x + g * V(per_group)));
        vst1q_u8(to + g * step + 16, V(bytes_of)(x + g * V(per_group) + 4));
    }
}

PC_VECTOR void V(put_pairs)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        const uint8x16_t a = V(bytes_of)(x + g * V(per_group));
        const uint8x16_t b = V(bytes_of)(x + g * V(per_group) + 4);
        vst1q_u8(to + g * step, vsliq_n_u8(vuzp1q_u8(a, b), vuzp2q_u8(a, b), 4));
    }
}

PC_VECTOR void V(put_split)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        const uint8x16_t a = V(bytes_of)(x + g * V(per_group));
        const uint8x16_t b = V(bytes_of)(x + g * V(per_group) + 4);
        vst1q_u8(to + g * step, vsliq_n_u8(a, b, 4));
    }
}

/* A byte to a lane; those of `low` before those of `high`. */
PC_VECTOR void V(widen_bytes)(uint8x16_t low, uint8x16_t high, vi *x) {
    for (int k = 0; k < 4; k++) {
        x[k] = (vi)V(spread)(low, k, 0);
        x[k + 4] = (vi)V(spread)(high, k, 0);
    }
}

PC_VECTOR void V(get_pairs)(const uint8_t *from, vi *x) {
    const uint8x16_t both = vld1q_u8(from);
    const uint8x16_t even = vandq_u8(both, vdupq_n_u8(15)), odd = vshrq_n_u8(both, 4);
    V(widen_bytes)(vzip1q_u8(even, odd), vzip2q_u8(even, odd), x);
}

PC_VECTOR void V(get_split)(const uint8_t *from, vi *x) {
    const uint8x16_t both = vld1q_u8(from);
    V(widen_bytes)(vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4), x);
}

PC_VECTOR vf V(to_floats)(vi x) {
    return (vf)vcvtq_f32_s32((int32x4_t)x);
}

PC_VECTOR vf V(all_half)(const uint8_t *from) {
    return V(half_of)(vdup_n_u16(pc_load_u16(from)));
}

/* NaN where either is; whoever asks looks for NaN as well. */
PC_VECTOR vf V(min)(vf a, vf b) {
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
}

PC_VECTOR vf V(with_sign)(vf x, float magnitude) {
    return (vf)vbslq_f32(vdupq_n_u32(0x80000000u), (float32x4_t)x, vdupq_n_f32(magnitude));
}

PC_VECTOR vi V(cut)(vf x) {
    return (vi)vcvtq_s32_f32((float32x4_t)x);
}

/* Unlike V(max), the machine's maximum is NaN where either is. */
PC_VECTOR int V(has_nan)(const vf *x) {
    float32x4_t most = (float32x4_t)x[0];
    for (int i = 1; i < V(per_group); i++) {
        most = vmaxq_f32(most, (float32x4_t)x[i]);
    }
    const float all = vmaxvq_f32(most);
    return all != all;
}

PC_VECTOR vi V(higher)(vi a, vi b) {
    return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

PC_VECTOR vi V(lower)(vi a, vi b) {
    return (vi)vminq_s32((int32x4_t)a, (int32x4_t)b);
}

PC_VECTOR int32x4_t V(greater_pairs)(const int floats, int32x4_t a, int32x4_t b) {
    return floats ? vreinterpretq_s32_f32(
                        vpmaxq_f32(vreinterpretq_f32_s32(a), vreinterpretq_f32_s32(b)))
                  : vpmaxq_s32(a, b);
}

PC_VECTOR pc_4i V(highest_of_each)(const int floats, const vi *v) {
    return (pc_4i)V(greater_pairs)(floats,
                                   V(greater_pairs)(floats, (int32x4_t)v[0], (int32x4_t)v[1]),
                                   V(greater_pairs)(floats, (int32x4_t)v[2], (int32x4_t)v[3]));
}

#endif
