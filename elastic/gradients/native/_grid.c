/* Add float32 numbers in fixed point, and round them to a grid, in one pass each.
 *
 * A sum has eight bytes a number, so adding reads and writes four times as much as the numbers are.
 * Two arrays are added in one pass over the sum: then it is as much as adding them in float32.
 *
 * Every function gives the bits that torch's separate operations give: a product by a power of two,
 * a rounding to even, a conversion. So ranks with and without this library agree. Each returns the
 * largest magnitude of the numbers as the bits of a float, which are ordered as the magnitudes are;
 * those of infinity and NaN are the largest.
 *
 * Numbers beyond the range of a sum (they were not expected) convert to something, which subtracting
 * them takes away again: integers wrap.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx2")))
#define MAGNITUDE 0x7fffffffu

static int is_wide;

/* Use the narrow functions, as on processors without AVX-512: for tests. */
void grid_narrow(void)
{
    is_wide = 0;
}

int grid_prepare(void)
{
    __builtin_cpu_init();
    is_wide = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return __builtin_cpu_supports("sse4.1");
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & MAGNITUDE;
}

static int64_t fixed(float value, double scale)
{
    return _mm_cvtsd_si64(_mm_set_sd((double)value * scale));
}

/* What is done with numbers in fixed point: they are stored, added or taken away. */
enum { STORE, ADD, TAKE };

static inline void put(int64_t *sum, int64_t value, int what)
{
    uint64_t old = what == STORE ? 0 : (uint64_t)*sum;
    *sum = (int64_t)(what == TAKE ? old - (uint64_t)value : old + (uint64_t)value);
}

static inline __attribute__((always_inline)) uint32_t narrow(int64_t *sums, const float *values,
    const float *others, size_t count, double scale, int what, int two)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]);
        uint64_t found = (uint64_t)fixed(values[i], scale);
        largest = bits > largest ? bits : largest;
        if (two) {
            bits = bits_of(others[i]);
            found += (uint64_t)fixed(others[i], scale);
            largest = bits > largest ? bits : largest;
        }
        put(sums + i, (int64_t)found, what);
    }
    return largest;
}

WIDE static inline __attribute__((always_inline)) __m512i eight(
    const float *values, __m512d by, __m256i *most)
{
    __m256 found = _mm256_loadu_ps(values);
    *most = _mm256_max_epu32(*most,
        _mm256_and_si256(_mm256_castps_si256(found), _mm256_set1_epi32((int)MAGNITUDE)));
    return _mm512_cvtpd_epi64(_mm512_mul_pd(_mm512_cvtps_pd(found), by));
}

WIDE static inline __attribute__((always_inline)) uint32_t wide(int64_t *sums, const float *values,
    const float *others, size_t count, double scale, int what, int two)
{
    const __m512d by = _mm512_set1_pd(scale);
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m512i found = eight(values + i, by, &most);
        if (two)
            found = _mm512_add_epi64(found, eight(others + i, by, &most));
        if (what != STORE) {
            __m512i old = _mm512_loadu_si512(sums + i);
            found = what == TAKE ? _mm512_sub_epi64(old, found) : _mm512_add_epi64(old, found);
        }
        _mm512_storeu_si512(sums + i, found);
    }
    uint32_t lanes[8], largest;
    largest = narrow(sums + i, values + i, two ? others + i : NULL, count - i, scale, what, two);
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int lane = 0; lane < 8; lane++)
        largest = lanes[lane] > largest ? lanes[lane] : largest;
    return largest;
}

/* `others` may be NULL. */
#define WAYS(name, what)                                                                       \
    WIDE static uint32_t name##_wide(                                                          \
        int64_t *sums, const float *values, const float *others, size_t count, double scale)   \
    {                                                                                          \
        return others ? wide(sums, values, others, count, scale, what, 1)                      \
                      : wide(sums, values, NULL, count, scale, what, 0);                       \
    }                                                                                          \
    uint32_t name(                                                                             \
        int64_t *sums, const float *values, const float *others, size_t count, double scale)   \
    {                                                                                          \
        if (is_wide)                                                                           \
            return name##_wide(sums, values, others, count, scale);                            \
        return others ? narrow(sums, values, others, count, scale, what, 1)                    \
                      : narrow(sums, values, NULL, count, scale, what, 0);                     \
    }

WAYS(fixed_store, STORE)
WAYS(fixed_add, ADD)
WAYS(fixed_take, TAKE)

/* The means of `terms` numbers, from their sums. */
static inline __attribute__((always_inline)) void divided(
    float *means, const int64_t *sums, size_t count, double scale, double terms)
{
    for (size_t i = 0; i < count; i++)
        means[i] = (float)((double)sums[i] * scale / terms);
}

WIDE static void divided_wide(
    float *means, const int64_t *sums, size_t count, double scale, double terms)
{
    divided(means, sums, count, scale, terms);
}

void fixed_mean(float *means, const int64_t *sums, size_t count, double scale, double terms)
{
    if (is_wide)
        divided_wide(means, sums, count, scale, terms);
    else
        divided(means, sums, count, scale, terms);
}

static inline __attribute__((always_inline)) uint32_t rounded(
    float *results, const float *values, size_t count, float up, float down)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]);
        largest = bits > largest ? bits : largest;
        results[i] = __builtin_rintf(values[i] * up) * down;
    }
    return largest;
}

__attribute__((target("sse4.1"))) static uint32_t rounded_narrow(
    float *results, const float *values, size_t count, float up, float down)
{
    return rounded(results, values, count, up, down);
}

WIDE static uint32_t rounded_wide(
    float *results, const float *values, size_t count, float up, float down)
{
    return rounded(results, values, count, up, down);
}

uint32_t grid_round(float *results, const float *values, size_t count, float up, float down)
{
    return is_wide ? rounded_wide(results, values, count, up, down)
                   : rounded_narrow(results, values, count, up, down);
}

#else

int grid_prepare(void)
{
    return 0;
}

#endif
