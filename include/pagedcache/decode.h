/* Rows of quantised formats into rows of values, by vectors: the values of pc_decode_row, rounded
 * to the dtype that is asked for. Included once per instruction set, by codec_all.h. */
#if defined(PC_ISA) && PC_WIDTH > 1

PC_VECTOR void V(read_group)(const int code, const uint8_t *quants, const uint8_t *scale_at,
                             vf *x) {
    const int by_float = code == PC_FORMAT_q8 || code == PC_FORMAT_q4;
    const float one = by_float ? pc_load_float(scale_at) : 0.0f;
    const vf scale = by_float ? V(all)(one == 0.0f ? 0.0f : one) : V(all_half)(scale_at);
    vi q[V(per_group)];
    if (code == PC_FORMAT_q8 || code == PC_FORMAT_q8_0) {
        PC_UNROLL
        for (int i = 0; i < V(per_group); i++) {
            x[i] = V(int8)(quants + i * PC_WIDTH) * scale;
        }
    } else if (code == PC_FORMAT_q4) {
        /* zeros are stored as bytes 0x00, which would become -0 */
        const float offset = one == 0.0f ? 0.0f : -8.0f;
        V(get_pairs)(quants, q);
        V(number_values)(q, offset, scale, NULL, x);
    } else if (code == PC_FORMAT_q4_0) {
        V(get_split)(quants, q);
        V(number_values)(q, -8.0f, scale, NULL, x);
    } else {
        const vf minimum = V(all_half)(scale_at + 2);
        V(get_split)(quants, q);
        V(number_values)(q, 0.0f, scale, &minimum, x);
    }
}

PC_VECTOR void V(decode_quantised)(const int code, const pc_place *from, const int dtype,
                                   const pc_span *span) {
    const pc_format f = pc_format_of(code);
    const int planar = f.packing == PC_PACK_PLANAR;
    const int64_t nbytes = PC_GROUP * pc_dtype_nbytes(dtype);
    const int64_t step = f.quant_nbytes + (planar ? 0 : f.scale_nbytes);
    const int64_t full = span->num_values / PC_GROUP, rest = span->num_values % PC_GROUP;
    for (int64_t row = 0; row < span->count; row++) {
        const uint8_t *data = from->at + row * from->step;
        const uint8_t *scale = planar ? from->scales + row * from->scale_step : data;
        uint8_t *to = span->at + row * span->step;
        for (int64_t group = 0; group < full; group++) {
            vf x[V(per_group)];
            V(read_group)(pc_rule_of(code), data + (planar ? 0 : f.scale_nbytes), scale, x);
            if (!V(put_group)(dtype, x, to)) {
                pc_decode_rest(code, data, scale, PC_GROUP, dtype, to);
            }
            data += step;
            scale += planar ? f.scale_nbytes : step;
            to += nbytes;
        }
        if (rest > 0) {
            pc_decode_rest(code, data, scale, rest, dtype, to);
        }
    }
}

#endif
