/*
 * Softmax in base 2, over vectors. Included once per instruction set, by attend_isa.h.
 *
 * Rows of scores have room for PC_SUMS more values behind their end, which may be overwritten.
 */
#ifdef PC_ISA

/* 2^x for x <= 0; 0 below -126. The polynomial (minimax on [-1/2, 1/2], exact at 0) is off by less
 * than 2e-9 of the value; what rounding adds stays below 2^-22 of it. NaN stays NaN. */
PC_VECTOR vf V(exp2)(vf x) {
    const vf magic = V(all)(12582912.0f); /* 3 * 2^22: adding it rounds to an integer */
    const vf bounded = V(max)(V(all)(-127.0f), x);
    const vf shifted = bounded + magic;
    const vf f = bounded - (shifted - magic);
    const vi power = (V(as_bits)(shifted) - V(as_bits)(magic) + 127u) << 23;
    vf y = V(fma)(f, V(all)(0.000153533621f), V(all)(0.00133988746f));
    y = V(fma)(f, y, V(all)(0.00961843736f));
    y = V(fma)(f, y, V(all)(0.0555033247f));
    y = V(fma)(f, y, V(all)(0.240226479f));
    y = V(fma)(f, y, V(all)(0.693147203f));
    y = V(fma)(f, y, V(all)(1.0f));
    return y * V(as_float)(power);
}

/* tanh(x): the series up to x^9 below 5/16 (what is left out is below 8e-8 of the value), and above
 * 1 - 2 / (e^2x + 1). NaN stays NaN. */
PC_VECTOR vf V(tanh)(vf x) {
    const vf zero = V(all)(0.0f);
    const vf size = V(max)(zero - x, x);
    const vf square = x * x;
    const vf e = V(exp2)(size * V(all)(-2.0f * PC_LOG2_E)); /* e^-2|x| */
    const vf large = (V(all)(1.0f) - e) / (V(all)(1.0f) + e);
    vf y = V(fma)(square, V(all)(62.0f / 2835.0f), V(all)(-17.0f / 315.0f));
    y = V(fma)(square, y, V(all)(2.0f / 15.0f));
    y = V(fma)(square, y, V(all)(-1.0f / 3.0f));
    const vf small = V(fma)(square * x, y, x);
    const vi sign = V(as_bits)(x) & 0x80000000u;
    const vi above = V(below)(V(all)(0.3125f), size);
    const vi signed_large = V(as_bits)(large) | sign;
    return V(as_float)((signed_large & above) | (V(as_bits)(small) & ~above));
}

/* scores[i] = factor * tanh(scores[i]) for i < n. */
PC_FUNCTION void V(cap_scores)(float *scores, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i += PC_WIDTH) {
        V(store)(scores + i, V(tanh)(V(load)(scores + i)) * V(all)(factor));
    }
}

/* Turn n > 0 scores into 2^(score - the greatest), of which the sum goes to *mass; returns the
 * greatest score. */
PC_FUNCTION float V(weigh)(float *scores, int64_t n, float *mass) {
    float lanes[PC_WIDTH], peak = -INFINITY, sum = 0.0f;
    vf most = V(all)(-INFINITY), total = V(all)(0.0f);
    for (int64_t i = n; i % PC_WIDTH != 0; i++) {
        scores[i] = -INFINITY;
    }
    for (int64_t i = 0; i < n; i += PC_WIDTH) {
        most = V(max)(V(load)(scores + i), most);
    }
    V(store)(lanes, most);
    for (int i = 0; i < PC_WIDTH; i++) {
        peak = lanes[i] > peak ? lanes[i] : peak;
    }
    for (int64_t i = 0; i < n; i += PC_WIDTH) {
        const vf p = V(exp2)(V(load)(scores + i) - V(all)(peak));
        V(store)(scores + i, p);
        total += p;
    }
    V(store)(lanes, total);
    for (int i = 0; i < PC_WIDTH; i++) {
        sum += lanes[i];
    }
    *mass = sum;
    return peak;
}

#endif
