/* Every codec of this build against the text that is for all machines: rows of all dtypes at odd
 * addresses and strides, of ordinary and of the worst values, into every format and back, under
 * both policies. Says the names of the codecs and how many comparisons went wrong.
 *
 * codecs [ROUNDS] */
#include <stdio.h>
#include <stdlib.h>

#include "pagedcache/codecs.h"

enum { MOST_ROWS = 33, MOST_VALUES = 200, ROOM = MOST_ROWS * (MOST_VALUES * 5 + 64) };

static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Values by mode: ordinary; any bits; small integers, so that many are equal; zeros among them; of
 * one magnitude that is drawn; of one sign; halves of steps; outliers; Inf and NaN at times. */
static float value_of(int mode, int shift) {
    float x = (float)((int64_t)(draw() % 2000001) - 1000000) / 1e6f * 8.0f;
    if (mode == 1)
        x = pc_bits_float((uint32_t)draw());
    if (mode == 2)
        x = (float)((int)(draw() % 15) - 7);
    if (mode == 3)
        x = draw() % 8 ? x : 0.0f * x;
    if (mode == 4)
        x = pc_bits_float(pc_float_bits(x) + ((uint32_t)(shift * 6) << 23));
    if (mode == 5)
        x = x < 0.0f ? -x : x;
    if (mode == 6)
        x = 0.5f * (float)((int)(draw() % 255) - 127);
    if (mode == 7)
        x = draw() % 16 ? x : 1e5f * x;
    if (mode == 8 && draw() % 64 == 0) {
        x = pc_bits_float(0x7F800000u | (uint32_t)(draw() & 0x80000001u));
    }
    return x;
}

static void narrow(int dtype, float x, uint8_t *to) {
    const uint16_t bits = dtype == 1 ? pc_float_to_half(x) : pc_float_to_bfloat(x);
    memcpy(to, dtype == 0 ? (const void *)&x : (const void *)&bits, dtype == 0 ? 4 : 2);
}

static uint8_t from[ROOM], want[ROOM], got[ROOM], want_scales[ROOM], got_scales[ROOM];
static float values[MOST_ROWS][MOST_VALUES];

static void fill_rows(pc_span *span, int64_t gap, int mode) {
    const int64_t nbytes = pc_dtype_nbytes(span->dtype);
    const int shift = (int)(draw() % 40) - 20;
    span->step = span->num_values * nbytes + gap * nbytes;
    span->at = from + draw() % 3 * nbytes;
    for (int64_t row = 0; row < span->count; row++) {
        for (int64_t i = 0; i < span->num_values; i++) {
            uint8_t *const at = span->at + row * span->step + i * nbytes;
            narrow(span->dtype, value_of(mode, shift), at);
            if (mode == 1 && span->dtype != 0) {
                const uint16_t any = (uint16_t)draw();
                memcpy(at, &any, 2);
            }
        }
        pc_widen_row(span->dtype, span->at + row * span->step, nbytes, span->num_values,
                     values[row]);
    }
}

static int encode_rows(const pc_span *span, const pc_place *place, uint8_t *at, uint8_t *scales,
                       int policy) {
    int status = PC_OK;
    for (int64_t row = 0; row < span->count && status == PC_OK; row++) {
        uint8_t *const to = at + row * place->step;
        if (span->dtype == place->code) {
            memcpy(to, span->at + row * span->step,
                   (size_t)(span->num_values * pc_dtype_nbytes(span->dtype)));
        } else {
            status = pc_encode_row(place->code, values[row], span->num_values, to,
                                   scales + row * place->scale_step, policy);
        }
    }
    return status;
}

/* Whether stored scales and minima are finite: which NaN a sum of two gives is not promised. */
static int sound(int code, const uint8_t *bytes, const uint8_t *scales, int64_t count) {
    const pc_format f = pc_format_of(code);
    const int apart = f.packing == PC_PACK_PLANAR;
    for (int64_t g = 0; f.scale_nbytes && g < pc_row_groups(code, count); g++) {
        const uint8_t *at =
            apart ? scales + g * f.scale_nbytes : bytes + g * (f.quant_nbytes + f.scale_nbytes);
        uint32_t bits;
        if (code == PC_FORMAT_q8 || code == PC_FORMAT_q4) {
            memcpy(&bits, at, 4);
            if ((bits & 0x7F800000u) == 0x7F800000u)
                return 0;
            continue;
        }
        for (int i = 0; i < f.scale_nbytes; i += 2) {
            if ((pc_load_u16(at + i) & 0x7C00u) == 0x7C00u)
                return 0;
        }
    }
    return 1;
}

static long check_rows(const pc_named_codec *known, int usable, int code) {
    pc_span span = {from, 0, 1 + (int64_t)(draw() % 6), 1 + (int64_t)(draw() % MOST_VALUES),
                    (int)(draw() % 3)};
    const int mode = (int)(draw() % 9), policy = (int)(draw() % 2);
    pc_place place = {want, want_scales, 0, 0, code};
    long wrong = 0;
    int status;
    if (draw() % 3 == 0)
        span.num_values = 32 * (1 + span.num_values % 6);
    place.step = pc_row_data_nbytes(code, span.num_values) + (int64_t)(draw() % 2 * 7);
    place.scale_step = pc_row_scale_nbytes(code, span.num_values) + (int64_t)(draw() % 2 * 4);
    fill_rows(&span, (int64_t)(draw() % 2 * 5), mode);
    memset(want, 7, sizeof want);
    memset(want_scales, 7, sizeof want_scales);
    status = encode_rows(&span, &place, want, want_scales, policy);
    for (int i = 0; i < usable; i++) {
        memset(got, 7, sizeof got);
        memset(got_scales, 7, sizeof got_scales);
        place.at = got;
        place.scales = got_scales;
        const int found = known[i].codec->encode(&span, &place, policy);
        if (found != status ||
            (status == PC_OK && (memcmp(want, got, sizeof want) != 0 ||
                                 memcmp(want_scales, got_scales, sizeof want_scales) != 0))) {
            printf("encode %d by %s: dtype %d mode %d rows %d values %d status %d %d\n", code,
                   known[i].name, span.dtype, mode, (int)span.count, (int)span.num_values, status,
                   found);
            wrong++;
        }
    }
    if (status != PC_OK)
        return wrong;
    if (draw() % 4 == 0) { /* bytes that nobody stored */
        for (int i = 0; i < 3000; i++)
            want[i] = (uint8_t)draw(), want_scales[i] = (uint8_t)draw();
    }
    place.at = want;
    place.scales = want_scales;
    for (int dtype = 0; dtype < 3; dtype++) {
        static uint8_t expected[ROOM];
        const int64_t nbytes = pc_dtype_nbytes(dtype);
        pc_span to = {got, span.num_values * nbytes + 6, span.count, span.num_values, dtype};
        int usual = 1;
        memset(expected, 9, sizeof expected);
        for (int64_t row = 0; row < span.count; row++) {
            uint8_t *const at = want + row * place.step;
            usual &= sound(code, at, want_scales + row * place.scale_step, span.num_values);
            if (dtype == code) {
                memcpy(expected + row * to.step, at, (size_t)(span.num_values * nbytes));
                continue;
            }
            pc_decode_row(code, at, want_scales + row * place.scale_step, span.num_values,
                          values[row]);
            for (int64_t i = 0; i < span.num_values; i++) {
                narrow(dtype, values[row][i], expected + row * to.step + i * nbytes);
            }
        }
        for (int i = 0; i < usable; i++) {
            memset(got, 9, sizeof got);
            known[i].codec->decode(&place, &to);
            if (usual && memcmp(expected, got, sizeof expected) != 0) {
                printf("decode %d by %s: dtype %d rows %d values %d\n", code, known[i].name, dtype,
                       (int)span.count, (int)span.num_values);
                wrong++;
            }
        }
    }
    return wrong;
}

static long check_channels(const pc_named_codec *known, int usable) {
    pc_span span = {from, 0, 1 + (int64_t)(draw() % PC_GROUP), 1 + (int64_t)(draw() % 100),
                    (int)(draw() % 3)};
    const int mode = (int)(draw() % 9), policy = (int)(draw() % 2);
    pc_channel_place place = {want, want_scales, 0};
    long wrong = 0;
    int status;
    if (draw() % 2)
        span.num_values = 32 * (1 + span.num_values % 3);
    place.step = (span.num_values + 1) / 2 + (int64_t)(draw() % 2 * 3);
    fill_rows(&span, (int64_t)(draw() % 2 * 5), mode);
    memset(want, 7, sizeof want);
    memset(want_scales, 7, sizeof want_scales);
    status = pc_plain_codec.encode_channels(&span, &place, policy);
    for (int i = 0; i < usable; i++) {
        memset(got, 7, sizeof got);
        memset(got_scales, 7, sizeof got_scales);
        place.at = got;
        place.scales = got_scales;
        const int found = known[i].codec->encode_channels(&span, &place, policy);
        if (found != status ||
            (status == PC_OK && (memcmp(want, got, sizeof want) != 0 ||
                                 memcmp(want_scales, got_scales, sizeof want_scales) != 0))) {
            printf("channels by %s: dtype %d mode %d rows %d values %d\n", known[i].name,
                   span.dtype, mode, (int)span.count, (int)span.num_values);
            wrong++;
        }
    }
    if (status != PC_OK)
        return wrong;
    place.at = want;
    place.scales = want_scales;
    for (int dtype = 0; dtype < 3; dtype++) {
        static uint8_t expected[ROOM];
        pc_span to = {expected, span.num_values * pc_dtype_nbytes(dtype) + 6, span.count,
                      span.num_values, dtype};
        memset(expected, 9, sizeof expected);
        pc_plain_codec.decode_channels(&place, &to);
        to.at = got;
        for (int i = 0; i < usable; i++) {
            memset(got, 9, sizeof got);
            known[i].codec->decode_channels(&place, &to);
            if (memcmp(expected, got, sizeof expected) != 0) {
                printf("channels back by %s: dtype %d rows %d values %d\n", known[i].name, dtype,
                       (int)span.count, (int)span.num_values);
                wrong++;
            }
        }
    }
    return wrong;
}

static long check_bounds(const pc_named_codec *known, int usable) {
    pc_span span = {from, 0, 1 + (int64_t)(draw() % 4), 1 + (int64_t)(draw() % MOST_VALUES),
                    (int)(draw() % 3)};
    const uint32_t most = pc_most_bits(span.dtype, (int)(draw() % 3));
    const uint32_t magnitude = span.dtype == 0 ? 0x7FFFFFFFu : 0x7FFFu;
    int within = 1;
    long wrong = 0;
    fill_rows(&span, (int64_t)(draw() % 2 * 5), draw() % 2 ? 8 : 0);
    if (draw() % 2) { /* exactly at the bound, or one above it */
        const uint32_t bits = most + (uint32_t)(draw() % 2);
        const int64_t i = (int64_t)(draw() % (uint64_t)span.num_values);
        memcpy(span.at + i * pc_dtype_nbytes(span.dtype), &bits,
               (size_t)pc_dtype_nbytes(span.dtype));
    }
    for (int64_t row = 0; row < span.count; row++) {
        for (int64_t i = 0; i < span.num_values; i++) {
            const uint8_t *const at = span.at + row * span.step + i * pc_dtype_nbytes(span.dtype);
            const uint32_t bits = span.dtype == 0 ? pc_load_u32(at) : pc_load_u16(at);
            within &= (bits & magnitude) <= most;
        }
    }
    for (int i = 0; i < usable; i++) {
        wrong += known[i].codec->all_within(&span, most) != within;
    }
    return wrong;
}

static long check_streams(const pc_named_codec *known, int usable) {
    const int64_t nbytes = (int64_t)(draw() % 700), in = (int64_t)(draw() % 70);
    const int64_t out = (int64_t)(draw() % 70);
    long wrong = 0;
    for (int i = 0; i < 900; i++)
        from[i] = (uint8_t)draw();
    for (int i = 0; i < usable; i++) {
        memset(want, 5, sizeof want);
        memset(got, 5, sizeof got);
        memcpy(want + out, from + in, (size_t)nbytes);
        known[i].codec->stream(got + out, from + in, nbytes);
        known[i].codec->stream_end();
        wrong += memcmp(want, got, sizeof want) != 0;
    }
    return wrong;
}

int main(int argc, char **argv) {
    int count = 0;
    const pc_named_codec *const known = pc_codecs(&count);
    const long rounds = argc > 1 ? atol(argv[1]) : 100;
    pc_named_codec all[8];
    long wrong = 0;
    memcpy(all, known, (size_t)count * sizeof *known);
    count = pc_usable_isas();
    all[count].name = "plain";
    all[count++].codec = &pc_plain_codec;
    for (long round = 0; round < rounds && wrong < 20; round++) {
        for (int code = 0; code < PC_NUM_FORMATS; code++)
            wrong += check_rows(all, count, code);
        wrong += check_channels(all, count) + check_bounds(all, count) + check_streams(all, count);
    }
    for (int i = 0; i < count; i++)
        printf("%s ", all[i].name);
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
