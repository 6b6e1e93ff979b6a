/* Copies past the caches. Included once per instruction set, by codec_all.h. */
#if defined(PC_ISA) && PC_WIDTH > 1

PC_VECTOR void V(stream_line)(uint8_t *to, const uint8_t *from) {
#if PC_WIDTH == 16
    _mm512_stream_si512((__m512i *)(void *)to, _mm512_loadu_si512(from));
#elif PC_WIDTH == 8
    for (int i = 0; i < V(line); i += 32) {
        _mm256_stream_si256((__m256i *)(void *)(to + i),
                            _mm256_loadu_si256((const __m256i *)(const void *)(from + i)));
    }
#elif PC_ON_X86
    for (int i = 0; i < V(line); i += 16) {
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
    }
#else
    memcpy(to, from, V(line));
#endif
}

PC_FUNCTION void V(stream)(uint8_t *to, const uint8_t *from, int64_t nbytes) {
    const int64_t before = (int64_t)(-(uintptr_t)to & (V(line) - 1));
    const int64_t skip = before < nbytes ? before : nbytes;
    int64_t at = skip;
    memcpy(to, from, (size_t)skip);
    for (; at + V(line) <= nbytes; at += V(line)) {
        V(stream_line)(to + at, from + at);
    }
    memcpy(to + at, from + at, (size_t)(nbytes - at));
}

PC_FUNCTION void V(stream_end)(void) {
#if PC_ON_X86
    _mm_sfence();
#endif
}

#endif
