/* Copy memory and checksum it in the same pass: what snapshots and checkpoints do with every byte.
 *
 * `stream_copy` is for snapshots. The copy is stored past the cache (streaming stores): nobody reads
 * it soon, so training keeps its cache, and the processor need not fetch what is about to be
 * overwritten. The checksum is CRC32C, folded as that of parity is. Processors without wide
 * carry-less products compute three independent chains at a time, because the instruction for it
 * takes three cycles but one can begin each cycle (Gopal et al., "Fast CRC Computation for iSCSI
 * Polynomial Using CRC32 Instruction", Intel 2011).
 *
 * `stream_refresh` writes only the runs that differ from what lies at their targets. It compares two
 * checksums of each, not the bytes: so a run that stays costs one read.
 *
 * `checked_copy` is for checkpoints. The copy stays in the cache: it goes to the disk from a buffer
 * that is used again and again. Two checksums are made of it, CRC32C by blocks and CRC-64/NVME of
 * all, by folding what is in registers anyway (Gopal et al., "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", Intel 2009).
 *
 * `stream_xor` is for parity: the exclusive or of some inputs is stored past the cache, and its
 * CRC32C is folded from the same registers. `stream_combine` does so for codes with several rows.
 *
 * `checked_read` is for restores: a file is read into memory and checksummed while it is in the
 * cache, in one call without the interpreter. `checked_pieces` does so with many pieces of a file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES ((size_t)128 << 10) /* that of holdfast.ckpt.native.crc */
#define READ_BYTES (4 * BLOCK_BYTES)    /* read at a time: they stay in the cache */

/* Read `size` bytes at `at` of a file, and store the CRC32C of each `BLOCK_BYTES` of them.
 *
 * Return the number of bytes read, fewer only where the file ends, or the negative number of an
 * error. `crc32` is a library's.
 */
int64_t checked_read(int file, int64_t at, char *to, size_t size, uint32_t *blocks,
    uint32_t (*crc32)(const void *, int, uint32_t))
{
    size_t done = 0, summed = 0;
    while (done < size) {
        size_t wanted = size - done < READ_BYTES ? size - done : READ_BYTES;
        ssize_t got = pread(file, to + done, wanted, (off_t)(at + (int64_t)done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        done += (size_t)got;
        while (summed < done && (done - summed >= BLOCK_BYTES || done == size || !got)) {
            size_t count = done - summed < BLOCK_BYTES ? done - summed : BLOCK_BYTES;
            blocks[summed / BLOCK_BYTES] = ~crc32(to + summed, (int)count, UINT32_MAX);
            summed += count;
        }
        if (!got)
            break;
    }
    return (int64_t)done;
}

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

/* Copy past the cache, in three chains. */
static uint32_t chained(char *to, const char *from, size_t size, uint32_t crc)
{
    size_t edge = -(uintptr_t)to % 16;
    crc = plain(to, from, edge, crc);
    to += edge, from += edge, size -= edge;
    for (; size >= 3 * WIDE; size -= 3 * WIDE, to += 3 * WIDE, from += 3 * WIDE)
        crc = lanes(to, from, WIDE, crc, wide_shift);
    for (; size >= 3 * NARROW; size -= 3 * NARROW, to += 3 * NARROW, from += 3 * NARROW)
        crc = lanes(to, from, NARROW, crc, narrow_shift);
    return plain(to, from, size, crc);
}

#define REGISTERS 256 /* bytes that are folded at once */
#define FOLDING __attribute__((target("avx512f,vpclmulqdq")))

/* Polynomials with their bits reflected, in the upper bits of a word. */
static const uint64_t nvme = 0x9a6c9329ac4bc9b5, castagnoli = (uint64_t)0x82f63b78 << 32;

/* What moves the two halves of 16 bytes forward, by four registers of 64 bytes or by one. */
typedef uint64_t shift_pair[2];
static shift_pair nvme_far, nvme_near, castagnoli_far, castagnoli_near;
static uint64_t nvme_table[256];

/* x^exponent modulo a polynomial whose lowest term is at bit 64 - `degree`. */
static uint64_t power(uint64_t polynomial, int degree, unsigned exponent)
{
    const uint64_t last = (uint64_t)1 << (64 - degree);
    uint64_t value = (uint64_t)1 << 63;
    for (; exponent; exponent--)
        value = value & last ? (value ^ last) >> 1 ^ polynomial : value >> 1;
    return value;
}

/* A product of reflected words comes out one bit too far, hence the odd exponents. */
static void fill_pair(shift_pair pair, uint64_t polynomial, int degree, unsigned bytes)
{
    pair[0] = power(polynomial, degree, 8 * bytes + 63);
    pair[1] = power(polynomial, degree, 8 * bytes - 1);
}

static uint64_t nvme_bytes(uint64_t state, const char *from, size_t size)
{
    for (; size; size--)
        state = state >> 8 ^ nvme_table[(state ^ (uint8_t)*from++) & 255];
    return state;
}

FOLDING static inline __m512i pairs(const shift_pair pair)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)pair[1], (int64_t)pair[0]));
}

FOLDING static inline __m512i begun(__m512i bytes, uint64_t state)
{
    return _mm512_xor_si512(bytes, _mm512_zextsi128_si512(_mm_cvtsi64_si128((int64_t)state)));
}

/* `sum` moved forward, and what lies there added. */
FOLDING static inline __m512i fold(__m512i sum, __m512i pair, __m512i bytes)
{
    return _mm512_xor_si512(bytes,
        _mm512_xor_si512(_mm512_clmulepi64_epi128(sum, pair, 0x00),
            _mm512_clmulepi64_epi128(sum, pair, 0x11)));
}

/* Sum up all whole `REGISTERS` of at least one, and copy them if `stored`; return their bytes. */
FOLDING static inline __attribute__((always_inline)) size_t folded(
    char *to, const char *from, size_t size, uint32_t *crc32, uint64_t *crc64, int stored)
{
    __m512i short_sum[4], long_sum[4];
    char rest[64];
    size_t at = REGISTERS;
    for (int i = 0; i < 4; i++) {
        short_sum[i] = long_sum[i] = _mm512_loadu_si512(from + 64 * i);
        if (stored)
            _mm512_storeu_si512(to + 64 * i, short_sum[i]);
    }
    short_sum[0] = begun(short_sum[0], *crc32);
    long_sum[0] = begun(long_sum[0], *crc64);
    for (__m512i one = pairs(castagnoli_far), other = pairs(nvme_far); at + REGISTERS <= size;
         at += REGISTERS)
        for (int i = 0; i < 4; i++) {
            __m512i bytes = _mm512_loadu_si512(from + at + 64 * i);
            if (stored)
                _mm512_storeu_si512(to + at + 64 * i, bytes);
            short_sum[i] = fold(short_sum[i], one, bytes);
            long_sum[i] = fold(long_sum[i], other, bytes);
        }
    for (int i = 1; i < 4; i++) {
        short_sum[i] = fold(short_sum[i - 1], pairs(castagnoli_near), short_sum[i]);
        long_sum[i] = fold(long_sum[i - 1], pairs(nvme_near), long_sum[i]);
    }
    _mm512_storeu_si512(rest, short_sum[3]);
    *crc32 = plain(rest, rest, sizeof rest, 0);
    _mm512_storeu_si512(rest, long_sum[3]);
    *crc64 = nvme_bytes(0, rest, sizeof rest);
    return at;
}

#ifndef CAN_FOLD /* tests compile also for processors that cannot */
#define CAN_FOLD (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
#endif
static int can_stream, can_fold;

/* Prepare; return whether this processor can do it. To be called first, by one thread. */
int stream_prepare(void)
{
    if (!__builtin_cpu_supports("sse4.2"))
        return 0;
    fill(wide_shift, WIDE);
    fill(narrow_shift, NARROW);
    fill_pair(castagnoli_far, castagnoli, 32, REGISTERS);
    fill_pair(castagnoli_near, castagnoli, 32, 64);
    can_fold = CAN_FOLD;
    can_stream = 1;
    return 1;
}

/* Prepare `checked_copy`; return whether this processor can do it. As `stream_prepare`. */
int checked_prepare(void)
{
    if (!stream_prepare() || !can_fold)
        return 0;
    fill_pair(nvme_far, nvme, 64, REGISTERS);
    fill_pair(nvme_near, nvme, 64, 64);
    for (uint64_t value = 0; value < 256; value++) {
        uint64_t state = value;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? nvme : 0);
        nvme_table[value] = state;
    }
    return 1;
}

/* Copy `size` bytes, which begin `at` bytes behind those that the checksums are of.
 *
 * `blocks` has the CRC32C of each `BLOCK_BYTES` of all, `whole` the CRC-64/NVME of all; both are
 * gone on with, and begin as zeros.
 */
FOLDING void checked_copy(
    char *to, const char *from, size_t size, size_t at, uint32_t *blocks, uint64_t *whole)
{
    uint64_t crc64 = ~*whole;
    while (size) {
        size_t room = BLOCK_BYTES - at % BLOCK_BYTES, count = size < room ? size : room, done = 0;
        uint32_t crc32 = ~blocks[at / BLOCK_BYTES];
        if (count >= REGISTERS)
            done = folded(to, from, count, &crc32, &crc64, 1);
        crc32 = plain(to + done, from + done, count - done, crc32);
        crc64 = nvme_bytes(crc64, to + done, count - done);
        blocks[at / BLOCK_BYTES] = ~crc32;
        to += count, from += count, at += count, size -= count;
    }
    *whole = ~crc64;
}

/* Both checksums of `size` bytes, which are only read. */
FOLDING static void both(const char *from, size_t size, uint32_t *crc32, uint64_t *crc64)
{
    char rest[REGISTERS];
    size_t done = 0;
    *crc32 = UINT32_MAX, *crc64 = UINT64_MAX;
    if (size >= REGISTERS)
        done = folded(rest, from, size, crc32, crc64, 0);
    *crc32 = ~plain(rest, from + done, size - done, *crc32);
    *crc64 = ~nvme_bytes(*crc64, from + done, size - done);
}

/* The exclusive or of 64 bytes of every input. */
FOLDING static inline __attribute__((always_inline)) __m512i mixed(
    size_t count, const uint64_t *sources, size_t at)
{
    __m512i bytes = _mm512_loadu_si512((const char *)(uintptr_t)sources[0] + at);
    for (size_t i = 1; i < count; i++)
        bytes = _mm512_xor_si512(
            bytes, _mm512_loadu_si512((const char *)(uintptr_t)sources[i] + at));
    return bytes;
}

/* As `plain`, of the exclusive or of bytes `at … end` of all inputs. */
__attribute__((target("sse4.2"))) static uint32_t mixed_bytes(
    char *to, size_t count, const uint64_t *sources, size_t at, size_t end, uint32_t crc)
{
    uint64_t state = crc, word, other;
    for (; end - at >= 8; at += 8) {
        memcpy(&word, (const char *)(uintptr_t)sources[0] + at, 8);
        for (size_t i = 1; i < count; i++) {
            memcpy(&other, (const char *)(uintptr_t)sources[i] + at, 8);
            word ^= other;
        }
        memcpy(to + at, &word, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (crc = (uint32_t)state; at < end; at++) {
        uint8_t byte = 0;
        for (size_t i = 0; i < count; i++)
            byte ^= ((const uint8_t *)(uintptr_t)sources[i])[at];
        to[at] = (char)byte;
        crc = _mm_crc32_u8(crc, byte);
    }
    return crc;
}

FOLDING static inline __attribute__((always_inline)) uint32_t xored(
    char *to, size_t count, const uint64_t *sources, size_t at, size_t end, uint32_t crc)
{
    size_t edge = -((uintptr_t)to + at) % LINE, first = edge < end - at ? at + edge : end;
    crc = mixed_bytes(to, count, sources, at, first, crc);
    at = first;
    if (end - at >= REGISTERS) {
        __m512i sums[4], far = pairs(castagnoli_far), near = pairs(castagnoli_near);
        char rest[LINE];
        for (int i = 0; i < 4; i++, at += LINE) {
            sums[i] = mixed(count, sources, at);
            _mm512_stream_si512((__m512i *)(to + at), sums[i]);
        }
        sums[0] = begun(sums[0], crc);
        for (; end - at >= REGISTERS; at += REGISTERS)
            for (int i = 0; i < 4; i++) {
                __m512i bytes = mixed(count, sources, at + LINE * i);
                _mm512_stream_si512((__m512i *)(to + at + LINE * i), bytes);
                sums[i] = fold(sums[i], far, bytes);
            }
        for (int i = 1; i < 4; i++)
            sums[i] = fold(sums[i - 1], near, sums[i]);
        _mm512_storeu_si512(rest, sums[3]);
        crc = plain(rest, rest, sizeof rest, 0);
    }
    return mixed_bytes(to, count, sources, at, end, crc);
}

FOLDING static uint32_t copied(char *to, const char *from, size_t size, uint32_t crc)
{
    uint64_t source = (uintptr_t)from;
    return xored(to, 1, &source, 0, size, crc);
}

/* Store the exclusive or of `count` inputs, and the CRC32C of each of `runs` runs of it.
 *
 * Run `i` is from byte `stops[i]` to `stops[i + 1]` of target and inputs. The target may be one of
 * the inputs. To be called where `checked_prepare` has returned 1.
 */
FOLDING void stream_xor(char *to, size_t count, const uint64_t *sources, size_t runs,
    const uint64_t *stops, uint32_t *checksums)
{
    for (size_t i = 0; i < runs; i++)
        checksums[i] = ~(count == 2 ? xored(to, 2, sources, stops[i], stops[i + 1], UINT32_MAX)
                                    : xored(to, count, sources, stops[i], stops[i + 1], UINT32_MAX));
    _mm_sfence();
}

/* Copy a part of a run; return the state of its CRC32C, given that of the bytes before. */
static uint32_t copy_part(char *to, const char *from, size_t size, uint32_t crc)
{
    if (size < STREAMED)
        return plain(to, from, size, crc);
    return can_fold ? copied(to, from, size, crc) : chained(to, from, size, crc);
}

/* Copy one run; return its CRC32C. */
static uint32_t copy_run(char *to, const char *from, size_t size)
{
    return ~copy_part(to, from, size, UINT32_MAX);
}

/* Copy `count` runs and store the CRC32C of each. Runs do not overlap. */
void stream_copy(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums)
{
    for (size_t i = 0; i < count; i++)
        checksums[i] = copy_run((char *)(uintptr_t)targets[i],
            (const char *)(uintptr_t)sources[i], sizes[i]);
    _mm_sfence();
}

enum { COPY = 0, READ = 1, COMPARE = 2 };

/* Bring `count` runs up to date; runs do not overlap.
 *
 * `modes` say per run: COPY it, READ it for both checksums before it is copied, or COMPARE: as READ,
 * but do not write a run whose checksums are those given. Afterwards a mode is 1 where the run was
 * written and both checksums are those of the written bytes, 2 where only the CRC32C is, 0 where it
 * was not written. `crc32` and `crc64` are a library's; they are NULL where `checked_prepare`
 * has returned 1.
 */
void stream_refresh(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums, uint64_t *wide, uint8_t *modes,
    uint32_t (*crc32)(const void *, int, uint32_t),
    uint64_t (*crc64)(uint64_t, const void *, uint64_t))
{
    for (size_t i = 0; i < count; i++) {
        const char *from = (const char *)(uintptr_t)sources[i];
        uint32_t read = 0;
        uint64_t found = 0;
        if (modes[i] != COPY) {
            if (crc64)
                read = ~crc32(from, (int)sizes[i], UINT32_MAX), found = crc64(0, from, sizes[i]);
            else
                both(from, sizes[i], &read, &found);
            if (modes[i] == COMPARE && read == checksums[i] && found == wide[i]) {
                modes[i] = 0;
                continue;
            }
        }
        checksums[i] = copy_run((char *)(uintptr_t)targets[i], from, sizes[i]);
        wide[i] = found;
        modes[i] = modes[i] != COPY && checksums[i] == read ? 1 : 2;
    }
    _mm_sfence();
}

#include "_combine.h"

#else

int stream_prepare(void)
{
    return 0;
}

void stream_xor(char *to, size_t count, const uint64_t *sources, size_t runs,
    const uint64_t *stops, uint32_t *checksums)
{
    (void)to, (void)count, (void)sources, (void)runs, (void)stops, (void)checksums;
}

int combine_prepare(void)
{
    return 0;
}

void stream_combine(size_t outputs, const uint64_t *targets, size_t count,
    const uint64_t *sources, const uint8_t *coefficients, size_t runs, const uint64_t *stops,
    uint32_t *checksums)
{
    (void)outputs, (void)targets, (void)count, (void)sources, (void)coefficients, (void)runs;
    (void)stops, (void)checksums;
}

void stream_copy(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums)
{
    (void)count, (void)sources, (void)targets, (void)sizes, (void)checksums;
}

void stream_refresh(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums, uint64_t *wide, uint8_t *modes,
    uint32_t (*crc32)(const void *, int, uint32_t),
    uint64_t (*crc64)(uint64_t, const void *, uint64_t))
{
    (void)count, (void)sources, (void)targets, (void)sizes, (void)checksums, (void)wide;
    (void)modes, (void)crc32, (void)crc64;
}

int checked_prepare(void)
{
    return 0;
}

void checked_copy(
    char *to, const char *from, size_t size, size_t at, uint32_t *blocks, uint64_t *whole)
{
    (void)to, (void)from, (void)size, (void)at, (void)blocks, (void)whole;
}

#endif

#include "_pieces.h"
