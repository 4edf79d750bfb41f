/* Combinations of inputs over GF(256) with their checksums, in one pass. A part of `_stream.c`.
 *
 * A product with a constant is linear over GF(2): one instruction (GFNI) multiplies 64 bytes by an
 * 8 by 8 matrix of bits. The field is ISA-L's, of the polynomial x^8 + x^4 + x^3 + x^2 + 1.
 */
#define COMBINING __attribute__((target("avx512f,avx512bw,vpclmulqdq,gfni")))
#define FIELD 0x11d
#define MOST_INPUTS 32
#define MOST_OUTPUTS 8

static uint8_t times(uint8_t factor, uint8_t value)
{
    unsigned product = 0;
    for (unsigned shifted = factor, bits = value; bits; bits >>= 1) {
        if (bits & 1)
            product ^= shifted;
        shifted = shifted << 1 ^ (shifted & 128 ? FIELD : 0);
    }
    return (uint8_t)product;
}

/* The matrix that multiplies by `factor`: the row of bit `i` of a product is byte `7 - i`. */
static uint64_t matrix_of(uint8_t factor)
{
    uint64_t matrix = 0;
    for (int column = 0; column < 8; column++) {
        uint8_t product = times(factor, (uint8_t)(1 << column));
        for (int bit = 0; bit < 8; bit++)
            matrix |= (uint64_t)(product >> bit & 1) << (8 * (7 - bit) + column);
    }
    return matrix;
}

/* `at … at + size`, at most a line, of an output, as `plain` copies it; returns its CRC32C. */
COMBINING static uint32_t combined_edge(char *to, size_t count, const uint64_t *sources,
    const uint64_t *matrices, size_t at, size_t size, uint32_t crc)
{
    char line[LINE];
    __m512i sum = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i++) {
        memset(line, 0, sizeof line);
        memcpy(line, (const char *)(uintptr_t)sources[i] + at, size);
        sum = _mm512_xor_si512(sum,
            _mm512_gf2p8affine_epi64_epi8(
                _mm512_loadu_si512(line), _mm512_set1_epi64((int64_t)matrices[i]), 0));
    }
    _mm512_storeu_si512(line, sum);
    return plain(to + at, line, size, crc);
}

/* 64 bytes of an output at `at`. */
COMBINING static inline __attribute__((always_inline)) __m512i combined_line(
    size_t count, const uint64_t *sources, const uint64_t *matrices, size_t at)
{
    __m512i sum = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i++)
        sum = _mm512_xor_si512(sum,
            _mm512_gf2p8affine_epi64_epi8(
                _mm512_loadu_si512((const char *)(uintptr_t)sources[i] + at),
                _mm512_set1_epi64((int64_t)matrices[i]), 0));
    return sum;
}

COMBINING static inline __attribute__((always_inline)) void store_lines(
    char *to, const __m512i lines[4])
{
    for (int i = 0; i < 4; i++)
        _mm512_stream_si512((__m512i *)(to + LINE * i), lines[i]);
}

/* Bytes `at … end` of all outputs, which lie alike within a line; as `xored`. */
COMBINING static inline __attribute__((always_inline)) void combined(size_t outputs,
    const uint64_t *targets, size_t count, const uint64_t *sources,
    uint64_t (*matrices)[MOST_INPUTS], size_t at, size_t end, uint32_t *crcs)
{
    size_t edge = -(targets[0] + at) % LINE, first = edge < end - at ? at + edge : end;
    for (size_t out = 0; out < outputs; out++)
        crcs[out] = first == at ? UINT32_MAX
                                : combined_edge((char *)(uintptr_t)targets[out], count, sources,
                                      matrices[out], at, first - at, UINT32_MAX);
    at = first;
    if (end - at >= REGISTERS) {
        __m512i sums[MOST_OUTPUTS][4], far = pairs(castagnoli_far), near = pairs(castagnoli_near);
        char rest[LINE];
        for (size_t out = 0; out < outputs; out++) {
            for (int i = 0; i < 4; i++)
                sums[out][i] = combined_line(count, sources, matrices[out], at + LINE * i);
            store_lines((char *)(uintptr_t)targets[out] + at, sums[out]);
            sums[out][0] = begun(sums[out][0], crcs[out]);
        }
        for (at += REGISTERS; end - at >= REGISTERS; at += REGISTERS)
            for (size_t out = 0; out < outputs; out++) {
                __m512i bytes[4];
                for (int i = 0; i < 4; i++)
                    bytes[i] = combined_line(count, sources, matrices[out], at + LINE * i);
                store_lines((char *)(uintptr_t)targets[out] + at, bytes);
                for (int i = 0; i < 4; i++)
                    sums[out][i] = fold(sums[out][i], far, bytes[i]);
            }
        for (size_t out = 0; out < outputs; out++) {
            for (int i = 1; i < 4; i++)
                sums[out][i] = fold(sums[out][i - 1], near, sums[out][i]);
            _mm512_storeu_si512(rest, sums[out][3]);
            crcs[out] = plain(rest, rest, sizeof rest, 0);
        }
    }
    for (size_t size; at < end; at += size) {
        size = end - at < LINE ? end - at : LINE;
        for (size_t out = 0; out < outputs; out++)
            crcs[out] = combined_edge((char *)(uintptr_t)targets[out], count, sources,
                matrices[out], at, size, crcs[out]);
    }
    for (size_t out = 0; out < outputs; out++)
        crcs[out] = ~crcs[out];
}

/* Prepare `stream_combine`; return the most inputs that it takes, 0 where it cannot be called. */
int combine_prepare(void)
{
    return checked_prepare() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("gfni")
        ? MOST_INPUTS
        : 0;
}

/* Store `outputs` combinations of `count` inputs, and the CRC32C of each of `runs` runs of each.
 *
 * Output `o` is the sum of all inputs, each times its one of the coefficients `o * count …`. Run `i`
 * is from byte `stops[i]` to `stops[i + 1]` of outputs and inputs; the checksum of output `o` is at
 * `o * runs + i`. An output may be an input only where it is the only output.
 */
COMBINING void stream_combine(size_t outputs, const uint64_t *targets, size_t count,
    const uint64_t *sources, const uint8_t *coefficients, size_t runs, const uint64_t *stops,
    uint32_t *checksums)
{
    uint64_t matrices[MOST_OUTPUTS][MOST_INPUTS];
    uint32_t crcs[MOST_OUTPUTS];
    for (size_t first = 0, some; first < outputs; first += some) {
        const uint64_t *to = targets + first;
        for (some = 1; some < MOST_OUTPUTS && first + some < outputs; some++)
            if ((to[some] - to[0]) % LINE)
                break;
        for (size_t out = 0; out < some; out++)
            for (size_t i = 0; i < count; i++)
                matrices[out][i] = matrix_of(coefficients[(first + out) * count + i]);
        for (size_t i = 0; i < runs; i++) {
            if (some == 1)
                combined(1, to, count, sources, matrices, stops[i], stops[i + 1], crcs);
            else if (some == 2)
                combined(2, to, count, sources, matrices, stops[i], stops[i + 1], crcs);
            else
                combined(some, to, count, sources, matrices, stops[i], stops[i + 1], crcs);
            for (size_t out = 0; out < some; out++)
                checksums[(first + out) * runs + i] = crcs[out];
        }
    }
    _mm_sfence();
}
