/* The operations of vector.h with NEON on 64-bit machines; vector_avx512.h says what they do. */
#if defined(PC_ISA) && PC_WIDTH == 4

PC_VECTOR vf V(all)(float x) {
    return (vf)vdupq_n_f32(x);
}

PC_VECTOR vf V(fma)(vf a, vf b, vf c) {
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

PC_VECTOR vi V(below)(vf a, vf b) {
    return (vi)vcltq_f32((float32x4_t)a, (float32x4_t)b);
}

/* Not vmaxq_f32, which has NaN where a is one. */
PC_VECTOR vf V(max)(vf a, vf b) {
    return (vf)vbslq_f32((uint32x4_t)V(below)(b, a), (float32x4_t)a, (float32x4_t)b);
}

PC_VECTOR vf V(half)(const uint8_t *from) {
    float16x4_t halves;
    memcpy(&halves, from, sizeof halves);
    return (vf)vcvt_f32_f16(halves);
}

/* Bytes 4 * k … 4 * k + 3, each as the highest byte of a lane, or as the lowest. An index from 16
 * on gives 0. */
PC_VECTOR uint32x4_t V(spread)(uint8x16_t bytes, const int k, const int highest) {
    static const uint8_t places[2][16] = {
        {0, 64, 64, 64, 1, 64, 64, 64, 2, 64, 64, 64, 3, 64, 64, 64},
        {64, 64, 64, 0, 64, 64, 64, 1, 64, 64, 64, 2, 64, 64, 64, 3}};
    const uint8x16_t index = vaddq_u8(vld1q_u8(places[highest]), vdupq_n_u8((uint8_t)(4 * k)));
    return vreinterpretq_u32_u8(vqtbl1q_u8(bytes, index));
}

PC_VECTOR uint8x16_t V(four_of)(const uint8_t *from) {
    uint32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    return vreinterpretq_u8_u32(vdupq_n_u32(bytes));
}

/* What the highest bits of lanes are as signed numbers: the conversion divides by 2 ** bits. */
#define PC_TOP(lanes, bits) (vf) vcvtq_n_f32_s32(vreinterpretq_s32_u32(lanes), 32 - (bits))

PC_VECTOR vf V(int8)(const uint8_t *from) {
    return PC_TOP(V(spread)(V(four_of)(from), 0, 1), 8);
}

PC_VECTOR void V(nibbles)(const uint8_t *from, vf *low, vf *high) {
    /* a nibble less 8 is the signed one whose highest bit is turned */
    const uint8x16_t bytes = veorq_u8(V(four_of)(from), vdupq_n_u8(0x88));
    const uint32x4_t x = V(spread)(bytes, 0, 1);
    *low = PC_TOP(vshlq_n_u32(x, 4), 4);
    *high = PC_TOP(vandq_u32(x, vdupq_n_u32(0xF0000000u)), 4);
}

#undef PC_TOP

PC_VECTOR vf V(bfloat)(const uint8_t *from) {
    uint16x4_t words;
    memcpy(&words, from, sizeof words);
    return (vf)vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}

PC_VECTOR vf V(half_of)(uint16x4_t words) {
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(words));
}

PC_VECTOR void V(half_pairs)(const uint8_t *from, vf *first, vf *second) {
    const uint16x4x4_t words = vld4_u16((const uint16_t *)(const void *)from);
    for (int i = 0; i < 2; i++) {
        first[i] = V(half_of)(words.val[2 * i]);
        second[i] = V(half_of)(words.val[2 * i + 1]);
    }
}

PC_VECTOR void V(split_halves)(const uint8_t *from, vf *first, vf *second) {
    const uint16x4x2_t words = vld2_u16((const uint16_t *)(const void *)from);
    *first = V(half_of)(words.val[0]);
    *second = V(half_of)(words.val[1]);
}

PC_VECTOR void V(transpose)(const uint8_t *const *rows, int64_t skip, float *to, int64_t stride) {
    uint32x4_t x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = vreinterpretq_u32_u8(vld1q_u8(rows[i] + skip));
    }
    for (int i = 0; i < 2; i++) { /* columns 2 * i and 2 * i + 1 */
        const uint32x4_t a = i ? vzip2q_u32(x[0], x[2]) : vzip1q_u32(x[0], x[2]);
        const uint32x4_t b = i ? vzip2q_u32(x[1], x[3]) : vzip1q_u32(x[1], x[3]);
        vst1q_f32(to + 2 * i * stride, vreinterpretq_f32_u32(vzip1q_u32(a, b)));
        vst1q_f32(to + (2 * i + 1) * stride, vreinterpretq_f32_u32(vzip2q_u32(a, b)));
    }
}

PC_VECTOR void V(add_up)(const vf *sums, float *out) {
    const float32x4_t low = vpaddq_f32((float32x4_t)sums[0], (float32x4_t)sums[1]);
    const float32x4_t high = vpaddq_f32((float32x4_t)sums[2], (float32x4_t)sums[3]);
    vst1q_f32(out, vpaddq_f32(low, high));
}

#endif
