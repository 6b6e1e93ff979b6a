/* The functions of one codec, compiled once per instruction set; by codecs.h. */
#ifdef PC_ISA

#if PC_WIDTH > 1
#include "vector.h"

#include "pack.h"

#include "convert.h"

#include "encode.h"

#include "decode.h"

#include "tiles.h"

#include "stream.h"
#endif

#if PC_WIDTH > 1

/* A case of the switches below for every dtype, which is a constant in each. */
#define PC_EACH_DTYPE(CASE, ...)         \
    CASE(PC_FORMAT_float32, __VA_ARGS__) \
    CASE(PC_FORMAT_float16, __VA_ARGS__) \
    CASE(PC_FORMAT_bfloat16, __VA_ARGS__)

PC_FUNCTION int V(encode)(const pc_span *from, const pc_place *to, int policy) {
    switch (to->code * PC_NUM_DTYPES + from->dtype) {
#define PC_CASE(dtype, code) \
    case code *PC_NUM_DTYPES + dtype: V(convert)(dtype, from, code, to->at, to->step); return PC_OK;
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_float32)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_float16)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_bfloat16)
#undef PC_CASE
#define PC_CASE(dtype, code) \
    case code *PC_NUM_DTYPES + dtype: return V(encode_quantised)(code, dtype, from, to, policy);
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q8)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q8_0)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4_0)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4_1)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4k)
#undef PC_CASE
    default: return pc_plain_encode(from, to, policy);
    }
}

PC_FUNCTION void V(decode)(const pc_place *from, const pc_span *to) {
    pc_span source = *to;
    switch (from->code * PC_NUM_DTYPES + to->dtype) {
#define PC_CASE(dtype, code)                                \
    case code *PC_NUM_DTYPES + dtype:                       \
        source.at = from->at;                               \
        source.step = from->step;                           \
        V(convert)(code, &source, dtype, to->at, to->step); \
        return;
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_float32)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_float16)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_bfloat16)
#undef PC_CASE
#define PC_CASE(dtype, code) \
    case code *PC_NUM_DTYPES + dtype: V(decode_quantised)(code, from, dtype, to); return;
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q8)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q8_0)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4_0)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4_1)
        PC_EACH_DTYPE(PC_CASE, PC_FORMAT_q4k)
#undef PC_CASE
    default: pc_plain_decode(from, to);
    }
}

PC_FUNCTION int V(encode_channels)(const pc_span *from, const pc_channel_place *to, int policy) {
    switch (from->dtype) {
    case PC_FORMAT_float32: return V(encode_tiles)(PC_FORMAT_float32, from, to, policy);
    case PC_FORMAT_float16: return V(encode_tiles)(PC_FORMAT_float16, from, to, policy);
    default: return V(encode_tiles)(PC_FORMAT_bfloat16, from, to, policy);
    }
}

PC_FUNCTION void V(decode_channels)(const pc_channel_place *from, const pc_span *to) {
    switch (to->dtype) {
    case PC_FORMAT_float32: V(decode_tiles)(from, PC_FORMAT_float32, to); break;
    case PC_FORMAT_float16: V(decode_tiles)(from, PC_FORMAT_float16, to); break;
    default: V(decode_tiles)(from, PC_FORMAT_bfloat16, to); break;
    }
}

#undef PC_EACH_DTYPE

static const pc_codec V(codec) = {V(encode),     V(decode), V(encode_channels), V(decode_channels),
                                  V(all_within), V(stream), V(stream_end)};

#else

#define pc_codec_baseline pc_plain_codec

#endif

#undef PC_TURNS_PAIRS

#endif
