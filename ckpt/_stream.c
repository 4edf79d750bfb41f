/* Copy runs of memory and checksum them in the same pass: what a snapshot does with every byte.
 *
 * The copy is stored past the cache (streaming stores): nobody reads it soon, so training keeps
 * its cache, and the processor need not fetch what is about to be overwritten. The checksum is
 * CRC32C, three independent chains at a time, because its instruction takes three cycles but one
 * can begin each cycle (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32
 * Instruction", Intel 2011).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE 4096   /* bytes of a chain, for long runs */
#define NARROW 256  /* and for what is left of them */
#define LINE 64
#define STREAMED 4096 /* shorter runs stay in the cache: their edges would cost more */

typedef uint32_t shift_table[4][256];
static shift_table wide_shift, narrow_shift;

__attribute__((target("sse4.2"))) static uint32_t append_zeros(uint32_t crc, size_t count)
{
    uint64_t state = crc;
    for (size_t i = 0; i < count; i += 8)
        state = _mm_crc32_u64(state, 0);
    return (uint32_t)state;
}

static void fill(shift_table table, size_t zeros)
{
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            table[byte][value] = append_zeros(value << (8 * byte), zeros);
}

static uint32_t shifted(const shift_table table, uint32_t crc)
{
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255]
        ^ table[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static inline uint64_t line(
    char *to, const char *from, uint64_t crc)
{
    for (int i = 0; i < LINE; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(from + i));
        _mm_stream_si128((__m128i *)(to + i), bytes);
        crc = _mm_crc32_u64(crc, (uint64_t)_mm_cvtsi128_si64(bytes));
        crc = _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(bytes, 1));
    }
    return crc;
}

/* Copy three chains of `lane` bytes each; `to` is aligned to 16 bytes. */
__attribute__((target("sse4.2"))) static inline uint32_t lanes(
    char *to, const char *from, size_t lane, uint32_t crc, const shift_table shift)
{
    uint64_t first = crc, second = 0, third = 0;
    for (size_t i = 0; i < lane; i += LINE) {
        first = line(to + i, from + i, first);
        second = line(to + lane + i, from + lane + i, second);
        third = line(to + 2 * lane + i, from + 2 * lane + i, third);
    }
    return shifted(shift, shifted(shift, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

/* Copy with ordinary stores. */
__attribute__((target("sse4.2"))) static uint32_t plain(
    char *to, const char *from, size_t size, uint32_t crc)
{
    uint64_t state = crc, word;
    for (; size >= 8; size -= 8, to += 8, from += 8) {
        memcpy(&word, from, 8);
        memcpy(to, &word, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (crc = (uint32_t)state; size; size--, to++, from++) {
        *to = *from;
        crc = _mm_crc32_u8(crc, (uint8_t)*from);
    }
    return crc;
}

static uint32_t copy_run(char *to, const char *from, size_t size, uint32_t crc)
{
    if (size >= STREAMED) {
        size_t edge = -(uintptr_t)to % 16;
        crc = plain(to, from, edge, crc);
        to += edge, from += edge, size -= edge;
        for (; size >= 3 * WIDE; size -= 3 * WIDE, to += 3 * WIDE, from += 3 * WIDE)
            crc = lanes(to, from, WIDE, crc, wide_shift);
        for (; size >= 3 * NARROW; size -= 3 * NARROW, to += 3 * NARROW, from += 3 * NARROW)
            crc = lanes(to, from, NARROW, crc, narrow_shift);
    }
    return plain(to, from, size, crc);
}

/* Prepare; return whether this processor can do it. To be called first, by one thread. */
int stream_prepare(void)
{
    if (!__builtin_cpu_supports("sse4.2"))
        return 0;
    fill(wide_shift, WIDE);
    fill(narrow_shift, NARROW);
    return 1;
}

/* Copy `count` runs and store the CRC32C of each. Runs do not overlap. */
void stream_copy(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums)
{
    for (size_t i = 0; i < count; i++)
        checksums[i] = ~copy_run((char *)(uintptr_t)targets[i],
            (const char *)(uintptr_t)sources[i], sizes[i], UINT32_MAX);
    _mm_sfence();
}

#else

int stream_prepare(void)
{
    return 0;
}

void stream_copy(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums)
{
    (void)count, (void)sources, (void)targets, (void)sizes, (void)checksums;
}

#endif
