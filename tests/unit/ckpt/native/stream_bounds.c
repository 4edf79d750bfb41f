/* Copies of random sizes at random alignments between buffers of exactly that size, for a build with
 * sanitizers: an access outside of a buffer ends the program. Every copy and checksum is compared
 * with plain code. Usage: stream_bounds SEED ROUNDS; prints what the processor can do, then "ok". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int stream_prepare(void);
void stream_copy(size_t count, const uint64_t *sources, const uint64_t *targets,
    const uint64_t *sizes, uint32_t *checksums);
int checked_prepare(void);
void checked_copy(
    char *to, const char *from, size_t size, size_t at, uint32_t *blocks, uint64_t *whole);
void stream_xor(char *to, size_t count, const uint64_t *sources, size_t runs, const uint64_t *stops,
    uint32_t *checksums);
int64_t checked_read(int file, int64_t at, char *to, size_t size, uint32_t *blocks,
    uint32_t (*crc32)(const void *, int, uint32_t));
int combine_prepare(void);
void stream_combine(size_t outputs, const uint64_t *targets, size_t count, const uint64_t *sources,
    const uint8_t *coefficients, size_t runs, const uint64_t *stops, uint32_t *checksums);
struct piece {
    int64_t at;
    uint64_t size, to, first, last, tail, rest;
};
size_t checked_pieces(int file, size_t count, const struct piece *pieces, char *room,
    uint32_t *blocks, uint32_t (*crc32)(const void *, int, uint32_t), int64_t *found);

#define BLOCK_BYTES ((size_t)128 << 10)
#define RUNS 3

static uint64_t crc_by_bits(const char *from, size_t size, uint64_t polynomial, uint64_t crc)
{
    for (; size; size--) {
        crc ^= (unsigned char)*from++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
    }
    return crc;
}

static uint32_t library(const void *from, int size, uint32_t crc)
{
    return (uint32_t)crc_by_bits(from, (size_t)size, 0x82f63b78, crc);
}

static uint32_t crc32c(const char *from, size_t size)
{
    return ~library(from, (int)size, UINT32_MAX);
}

static uint64_t crc64(const char *from, size_t size)
{
    return ~crc_by_bits(from, size, 0x9a6c9329ac4bc9b5, UINT64_MAX);
}

static void require(int holds, const char *what, size_t size)
{
    if (!holds) {
        printf("%s is wrong at %zu bytes\n", what, size);
        exit(1);
    }
}

static size_t random_size(void)
{
    static const size_t most[] = {64, 5000, 40000, 400000};
    return (size_t)rand() % most[rand() % 4];
}

static char *filled(size_t size)
{
    char *buffer = malloc(size);
    for (size_t i = 0; i < size; i++)
        buffer[i] = (char)rand();
    return buffer;
}

static void check_streams(void)
{
    char *from[RUNS], *to[RUNS];
    uint64_t sources[RUNS], targets[RUNS], sizes[RUNS];
    uint32_t sums[RUNS];
    for (int i = 0; i < RUNS; i++) {
        size_t before = (size_t)rand() % 33, behind = (size_t)rand() % 33;
        sizes[i] = random_size();
        from[i] = filled(sizes[i] + before), to[i] = filled(sizes[i] + behind);
        sources[i] = (uintptr_t)(from[i] + before), targets[i] = (uintptr_t)(to[i] + behind);
    }
    stream_copy(RUNS, sources, targets, sizes, sums);
    for (int i = 0; i < RUNS; i++) {
        const char *source = (const char *)(uintptr_t)sources[i];
        require(!memcmp(source, (const char *)(uintptr_t)targets[i], sizes[i]), "a copy", sizes[i]);
        require(sums[i] == crc32c(source, sizes[i]), "a CRC32C", sizes[i]);
        free(from[i]), free(to[i]);
    }
}

static void check_blocks(void)
{
    size_t size = random_size(), before = (size_t)rand() % 33, behind = (size_t)rand() % 33;
    size_t count = (size + BLOCK_BYTES - 1) / BLOCK_BYTES;
    char *from = filled(size + before), *to = filled(size + behind);
    uint32_t *blocks = calloc(count, sizeof *blocks);
    uint64_t whole = 0;
    for (size_t at = 0, part; at < size; at += part) {
        part = rand() % 3 ? 1 + (size_t)rand() % (size - at) : size - at;
        checked_copy(to + behind + at, from + before + at, part, at, blocks, &whole);
    }
    require(!memcmp(from + before, to + behind, size), "a checked copy", size);
    require(whole == crc64(from + before, size), "a CRC-64", size);
    for (size_t i = 0; i < count; i++) {
        size_t at = i * BLOCK_BYTES, part = size - at < BLOCK_BYTES ? size - at : BLOCK_BYTES;
        require(blocks[i] == crc32c(from + before + at, part), "the CRC32C of a block", part);
    }
    free(blocks), free(from), free(to);
}

static void check_xor(void)
{
    enum { MOST = 4 };
    size_t size = random_size() + 3, count = 1 + (size_t)rand() % MOST, behind = (size_t)rand() % 70;
    char *from[MOST], *to = filled(size + behind), *wanted = calloc(size, 1);
    uint64_t sources[MOST], stops[RUNS + 1] = {(size_t)rand() % size, 0, 0, size};
    uint32_t sums[RUNS];
    stops[1] = stops[0] + (size_t)rand() % (size - stops[0]);
    stops[2] = stops[1] + (size_t)rand() % (size - stops[1]);
    for (size_t i = 0; i < count; i++) {
        size_t before = (size_t)rand() % 70;
        from[i] = filled(size + before), sources[i] = (uintptr_t)(from[i] + before);
    }
    if (rand() % 2)
        sources[rand() % (int)count] = (uintptr_t)(to + behind);
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at < size; at++)
            wanted[at] = (char)(wanted[at] ^ ((const char *)(uintptr_t)sources[i])[at]);
    stream_xor(to + behind, count, sources, RUNS, stops, sums);
    require(!memcmp(to + behind + stops[0], wanted + stops[0], size - stops[0]), "a sum", size);
    for (int i = 0; i < RUNS; i++)
        require(sums[i] == crc32c(wanted + stops[i], stops[i + 1] - stops[i]), "its CRC32C", size);
    for (size_t i = 0; i < count; i++)
        free(from[i]);
    free(to), free(wanted);
}

static unsigned char product(unsigned char one, unsigned char other)
{
    unsigned found = 0, shifted = one;
    for (; other; other >>= 1, shifted = shifted << 1 ^ (shifted & 128 ? 0x11d : 0))
        found ^= other & 1 ? shifted : 0;
    return (unsigned char)found;
}

static void check_combine(void)
{
    enum { MOST = 4 };
    size_t size = random_size() % 40000 + 3, count = 1 + (size_t)rand() % MOST;
    size_t outputs = 1 + (size_t)rand() % MOST;
    char *from[MOST], *to[MOST], *wanted = malloc(size);
    uint64_t sources[MOST], targets[MOST], stops[RUNS + 1] = {(size_t)rand() % size, 0, 0, size};
    uint8_t coefficients[MOST * MOST];
    uint32_t sums[MOST * RUNS];
    stops[1] = stops[0] + (size_t)rand() % (size - stops[0]);
    stops[2] = stops[1] + (size_t)rand() % (size - stops[1]);
    for (size_t i = 0; i < count; i++) {
        size_t before = (size_t)rand() % 70;
        from[i] = filled(size + before), sources[i] = (uintptr_t)(from[i] + before);
    }
    for (size_t i = 0; i < outputs; i++) {
        size_t behind = rand() % 2 ? 0 : (size_t)rand() % 70;
        to[i] = filled(size + behind), targets[i] = (uintptr_t)(to[i] + behind);
    }
    for (size_t i = 0; i < outputs * count; i++)
        coefficients[i] = (uint8_t)rand();
    stream_combine(outputs, targets, count, sources, coefficients, RUNS, stops, sums);
    for (size_t out = 0; out < outputs; out++) {
        memset(wanted, 0, size);
        for (size_t i = 0; i < count; i++)
            for (size_t at = 0; at < size; at++)
                wanted[at] ^= (char)product(coefficients[out * count + i],
                    ((const unsigned char *)(uintptr_t)sources[i])[at]);
        const char *made = (const char *)(uintptr_t)targets[out];
        require(!memcmp(made + stops[0], wanted + stops[0], size - stops[0]), "a row", size);
        for (size_t i = 0; i < RUNS; i++)
            require(sums[out * RUNS + i] == crc32c(wanted + stops[i], stops[i + 1] - stops[i]),
                "the CRC32C of a row", size);
        free(to[out]);
    }
    for (size_t i = 0; i < count; i++)
        free(from[i]);
    free(wanted);
}

static void check_read(void)
{
    size_t size = random_size(), extra = (size_t)rand() % 3 ? 0 : 1 + random_size();
    size_t at = (size_t)rand() % (size + 1), wanted = size - at + extra;
    size_t count = (wanted + BLOCK_BYTES - 1) / BLOCK_BYTES;
    char *data = filled(size), *to = filled(wanted);
    uint32_t *blocks = calloc(count, sizeof *blocks);
    FILE *file = tmpfile();
    require(file && fwrite(data, 1, size, file) == size && !fflush(file), "a file", size);
    int64_t got = checked_read(fileno(file), (int64_t)at, to, wanted, blocks, library);
    require(got == (int64_t)(size - at), "a length", size);
    require(!memcmp(to, data + at, size - at), "a read", size);
    for (size_t i = 0; i * BLOCK_BYTES < size - at; i++) {
        size_t rest = size - at - i * BLOCK_BYTES, part = rest < BLOCK_BYTES ? rest : BLOCK_BYTES;
        require(blocks[i] == crc32c(to + i * BLOCK_BYTES, part), "the CRC32C of a read", part);
    }
    require(checked_read(-1, 0, to, 1, blocks, library) < 0 || !wanted, "a refusal", size);
    fclose(file), free(blocks), free(to), free(data);
}

static void check_pieces(void)
{
    size_t size = random_size() + 2, at = (size_t)rand() % size, nbytes = 1 + (size_t)rand() % (size - at);
    size_t first = (size_t)rand() % (nbytes < BLOCK_BYTES ? nbytes : BLOCK_BYTES);
    size_t whole = (nbytes - 1) / BLOCK_BYTES * BLOCK_BYTES, least = whole > first ? whole : first;
    size_t last = rand() % 2 ? nbytes : least + (size_t)rand() % (nbytes - least + 1);
    size_t rest = (size_t)rand() % 70, left = size - at - nbytes, kept = rest < left ? rest : left;
    char *data = filled(size), *to = malloc(last - first), *tail = malloc(rest), *room = malloc(BLOCK_BYTES);
    uint32_t *blocks = calloc(whole / BLOCK_BYTES + 1, sizeof *blocks);
    struct piece piece = {(int64_t)at, nbytes, (uintptr_t)to, first, last, (uintptr_t)tail, rest};
    int64_t found = 0;
    FILE *file = tmpfile();
    require(file && fwrite(data, 1, size, file) == size && !fflush(file), "a file", size);
    size_t done = checked_pieces(fileno(file), 1, &piece, room, blocks, library, &found);
    require(done == (kept == rest), "the number of pieces", size);
    require(done || found == (int64_t)(nbytes + kept), "a piece's length", size);
    require(!memcmp(to, data + at + first, last - first), "a piece", nbytes);
    require(!memcmp(tail, data + at + nbytes, kept), "what follows a piece", nbytes);
    for (size_t i = 0; i <= whole / BLOCK_BYTES; i++) {
        size_t end = i * BLOCK_BYTES + BLOCK_BYTES < nbytes ? i * BLOCK_BYTES + BLOCK_BYTES : nbytes;
        size_t part = end - i * BLOCK_BYTES;
        require(blocks[i] == crc32c(data + at + i * BLOCK_BYTES, part), "a piece's CRC32C", part);
    }
    fclose(file), free(blocks), free(room), free(tail), free(to), free(data);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    srand((unsigned)atoi(argv[1]));
    int streams = stream_prepare(), blocks = checked_prepare();
    printf("streams %d, blocks %d\n", streams, blocks);
    for (int round = atoi(argv[2]); round; round--) {
        if (streams)
            check_streams();
        if (blocks)
            check_blocks(), check_xor();
        if (combine_prepare())
            check_combine();
        check_read(), check_pieces();
    }
    puts("ok");
    return 0;
}
