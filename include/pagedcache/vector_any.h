/* The operations of vector.h for every compiler; vector_avx512.h says what they do. */
#if defined(PC_ISA) && PC_WIDTH <= 4

PC_VECTOR vf V(all)(float x) {
    vf v;
    for (int i = 0; i < PC_WIDTH; i++) {
        memcpy((char *)&v + 4 * i, &x, 4);
    }
    return v;
}

PC_VECTOR vf V(fma)(vf a, vf b, vf c) {
    return a * b + c;
}

PC_VECTOR vi V(below)(vf a, vf b) {
#if PC_WIDTH == 1
    return a < b ? UINT32_MAX : 0u;
#else
    return (vi)(a < b);
#endif
}

PC_VECTOR vf V(max)(vf a, vf b) {
    const vi below = V(below)(b, a);
    return V(as_float)((below & V(as_bits)(a)) | (~below & V(as_bits)(b)));
}

PC_VECTOR vf V(half)(const uint8_t *from) {
    float x[PC_WIDTH];
    for (int i = 0; i < PC_WIDTH; i++) {
        x[i] = pc_load_half(from + 2 * i);
    }
    return V(load)(x);
}

PC_VECTOR vf V(int8)(const uint8_t *from) {
    float x[PC_WIDTH];
    for (int i = 0; i < PC_WIDTH; i++) {
        x[i] = (float)(int8_t)from[i];
    }
    return V(load)(x);
}

PC_VECTOR void V(nibbles)(const uint8_t *from, vf *low, vf *high) {
    float x[PC_WIDTH], y[PC_WIDTH];
    for (int i = 0; i < PC_WIDTH; i++) {
        x[i] = (float)((from[i] & 15) - 8);
        y[i] = (float)((from[i] >> 4) - 8);
    }
    *low = V(load)(x);
    *high = V(load)(y);
}

PC_VECTOR vf V(bfloat)(const uint8_t *from) {
    float x[PC_WIDTH];
    for (int i = 0; i < PC_WIDTH; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        x[i] = pc_bfloat_to_float(bits);
    }
    return V(load)(x);
}

PC_VECTOR void V(half_pairs)(const uint8_t *from, vf *first, vf *second) {
    uint8_t halves[2 * PC_WIDTH];
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < PC_WIDTH; i++) {
            memcpy(halves + 2 * i, from + 8 * i + 2 * j, 2);
        }
        *(j % 2 ? &second[j / 2] : &first[j / 2]) = V(half)(halves);
    }
}

PC_VECTOR void V(split_halves)(const uint8_t *from, vf *first, vf *second) {
    uint8_t halves[2][2 * PC_WIDTH];
    for (int i = 0; i < PC_WIDTH; i++) {
        memcpy(halves[0] + 2 * i, from + 4 * i, 2);
        memcpy(halves[1] + 2 * i, from + 4 * i + 2, 2);
    }
    *first = V(half)(halves[0]);
    *second = V(half)(halves[1]);
}

PC_VECTOR void V(transpose)(const uint8_t *const *rows, int64_t skip, float *to, int64_t stride) {
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            memcpy(to + j * stride + i, rows[i] + skip + 4 * j, 4);
        }
    }
}

PC_VECTOR void V(add_up)(const vf *sums, float *out) {
    float x[PC_WIDTH][PC_WIDTH];
    memcpy(x, sums, sizeof x);
    for (int i = 0; i < PC_WIDTH; i++) {
        out[i] = x[i][0];
        for (int j = 1; j < PC_WIDTH; j++) {
            out[i] += x[i][j];
        }
    }
}

#endif
