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

#define BLOCK_BYTES ((size_t)128 << 10)
#define RUNS 3

static uint64_t crc_by_bits(const char *from, size_t size, uint64_t polynomial, uint64_t ones)
{
    uint64_t crc = ones;
    for (; size; size--) {
        crc ^= (unsigned char)*from++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
    }
    return crc ^ ones;
}

static uint32_t crc32c(const char *from, size_t size)
{
    return (uint32_t)crc_by_bits(from, size, 0x82f63b78, UINT32_MAX);
}

static uint64_t crc64(const char *from, size_t size)
{
    return crc_by_bits(from, size, 0x9a6c9329ac4bc9b5, UINT64_MAX);
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

static uint32_t library(const void *from, int size, uint32_t crc)
{
    (void)crc;
    return ~crc32c(from, (size_t)size);
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
        check_read();
    }
    puts("ok");
    return 0;
}
