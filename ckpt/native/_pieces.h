/* Pieces of a file, read and checksummed by blocks in one call. A part of `_stream.c`.
 *
 * A restore reads a few hundred pieces of a few hundred kilobytes: one call for all of them leaves
 * the interpreter to the other threads. Pieces that the page cache has are copied from there, with
 * the checksum in the same pass; `pread` takes half as long again, as the kernel's copy and the
 * checksum are two passes.
 */
#include <signal.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#define HUGE_BYTES ((uint64_t)2 << 20) /* what begins there in file and memory is one page to map */

/* Read until `size` bytes are there or the file ends; return them, or the negative of an error. */
static int64_t read_all(int file, int64_t at, char *to, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t got = pread(file, to + done, size - done, (off_t)(at + (int64_t)done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (!got)
            break;
        done += (size_t)got;
    }
    return (int64_t)done;
}

/* `size` bytes of the file from `at`, cut into blocks from there on. Of them, those from `first` to
 * `last` are wanted at the address `to`; the others are only checksummed. The `rest` bytes that
 * follow in the file go to the address `tail`, without a checksum. */
struct piece {
    int64_t at;
    uint64_t size, to, first, last, tail, rest;
};

/* Read one piece; return the number of its bytes, the rest included, as `read_all` does. */
static int64_t read_piece(int file, const struct piece *piece, char *room, uint32_t *blocks,
    uint32_t (*crc32)(const void *, int, uint32_t))
{
    char *to = (char *)(uintptr_t)piece->to;
    uint64_t done = 0, end;
    int64_t got;
    for (; done < piece->size; done = end) {
        char *here = room;
        end = piece->size - done < BLOCK_BYTES ? piece->size : done + BLOCK_BYTES;
        if (done >= piece->first && end <= piece->last) {
            uint64_t most = piece->last < piece->size ? piece->last : piece->size;
            if (most - done > READ_BYTES)
                most = done + READ_BYTES;
            end = most == piece->size ? most : most - (most - done) % BLOCK_BYTES;
            here = to + (done - piece->first);
        }
        if ((got = read_all(file, piece->at + (int64_t)done, here, end - done)) < 0)
            return got;
        if ((uint64_t)got < end - done)
            return (int64_t)done + got;
        for (uint64_t at = 0; at < end - done; at += BLOCK_BYTES) {
            uint64_t count = end - done - at < BLOCK_BYTES ? end - done - at : BLOCK_BYTES;
            *blocks++ = ~crc32(here + at, (int)count, UINT32_MAX);
        }
        if (here == room) {
            uint64_t from = done > piece->first ? done : piece->first;
            uint64_t until = end < piece->last ? end : piece->last;
            if (from < until)
                memcpy(to + (from - piece->first), room + (from - done), until - from);
        }
    }
    got = read_all(file, piece->at + (int64_t)done, (char *)(uintptr_t)piece->tail, piece->rest);
    return got < 0 ? got : (int64_t)done + got;
}

/* Copy bytes; return the state of the CRC32C of what was copied, given that of the bytes before. */
static uint32_t copy_on(char *to, const char *from, size_t size, uint32_t crc,
    uint32_t (*crc32)(const void *, int, uint32_t))
{
#if defined(__x86_64__)
    if (can_stream)
        return copy_part(to, from, size, crc);
#endif
    memcpy(to, from, size);
    return crc32(to, (int)size, crc);
}

/* As `read_piece`, of a piece that lies in memory at `from`. Every byte is read once: so a file that
 * changes meanwhile does not have other bytes than the checksums are of. */
static void copy_piece(const char *from, const struct piece *piece, uint32_t *blocks,
    uint32_t (*crc32)(const void *, int, uint32_t))
{
    char *to = (char *)(uintptr_t)piece->to;
    for (uint64_t done = 0, end; done < piece->size; done = end) {
        end = piece->size - done < BLOCK_BYTES ? piece->size : done + BLOCK_BYTES;
        uint64_t first = done > piece->first ? done : piece->first;
        uint64_t last = end < piece->last ? end : piece->last;
        if (first >= last)
            first = last = end;
        uint32_t crc = crc32(from + done, (int)(first - done), UINT32_MAX);
        if (first < last)
            crc = copy_on(to + (first - piece->first), from + first, last - first, crc, crc32);
        *blocks++ = ~crc32(from + last, (int)(end - last), crc);
    }
    memcpy((char *)(uintptr_t)piece->tail, from + piece->size, piece->rest);
}

/* Mapped memory whose bytes may be gone: the file was cut, or its disk fails. The kernel then sends
 * SIGBUS to the thread that touches them, which goes on at `back`. */
struct guarded {
    char *from;
    int64_t at; /* in the file */
    size_t size;
    sigjmp_buf back;
};

/* The memory of the thread is there before the signal comes: its handler may not allocate it. */
static __thread struct guarded *volatile guarded __attribute__((tls_model("initial-exec")));
static struct sigaction others; /* what the process did with SIGBUS before */

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    struct guarded *here = guarded;
    if (here && info->si_code > 0
        && (uintptr_t)info->si_addr - (uintptr_t)here->from < here->size) {
        guarded = NULL;
        siglongjmp(here->back, 1);
    }
    if (others.sa_flags & SA_SIGINFO)
        others.sa_sigaction(number, info, context);
    else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN)
        others.sa_handler(number);
    else if (others.sa_handler == SIG_DFL || info->si_code > 0) {
        signal(number, SIG_DFL); /* it ends the process once this handler returns */
        raise(number);
    }
}

/* Have SIGBUS handled here first; return whether it is.
 *
 * Nothing is done about a handler that came later: it may hand the signal on to this one, and would
 * get it back without an end. Its process reads without mapped memory from then on.
 */
static int watch_bus_errors(void)
{
    static int watched;
    struct sigaction now, mine = {0};
    if (sigaction(SIGBUS, NULL, &now))
        return 0;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus_error)
        return 1;
    if (__atomic_load_n(&watched, __ATOMIC_ACQUIRE))
        return 0;
    others = now;
    mine.sa_sigaction = on_bus_error;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&mine.sa_mask);
    if (sigaction(SIGBUS, &mine, NULL))
        return 0;
    __atomic_store_n(&watched, 1, __ATOMIC_RELEASE);
    return 1;
}

/* Whether the page cache has the first byte of a piece, on a file system that can tell. */
static int is_cached(int file, const struct piece *piece)
{
#ifdef RWF_NOWAIT
    char byte;
    struct iovec room = {&byte, 1};
    return preadv2(file, &room, 1, (off_t)piece->at, RWF_NOWAIT) == 1;
#else
    (void)file, (void)piece;
    return 0;
#endif
}

/* Map the part of the file that has the pieces, if all of them can be copied from there. */
static int map_pieces(int file, size_t count, const struct piece *pieces, struct guarded *here)
{
    uint64_t low = UINT64_MAX, high = 0;
    struct stat found;
    for (size_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)pieces[i].at, end = at + pieces[i].size + pieces[i].rest;
        low = at < low ? at : low;
        high = end > high ? end : high;
        if (!is_cached(file, &pieces[i]))
            return 0;
    }
    /* A mapped page has zeros behind the end of its file. */
    if (low >= high || fstat(file, &found) || high > (uint64_t)found.st_size)
        return 0;
    low -= low % HUGE_BYTES;
    high += -high % HUGE_BYTES;
    here->at = (int64_t)low, here->size = high - low;
    here->from = mmap(NULL, here->size, PROT_READ, MAP_PRIVATE, file, (off_t)low);
    return here->from != MAP_FAILED;
}

/* Copy `count` pieces of mapped memory. */
static void copy_pieces(const struct guarded *here, size_t count, const struct piece *pieces,
    uint32_t *blocks, uint32_t (*crc32)(const void *, int, uint32_t))
{
    for (size_t i = 0; i < count; i++) {
        copy_piece(here->from + (pieces[i].at - here->at), &pieces[i], blocks, crc32);
        blocks += (pieces[i].size + BLOCK_BYTES - 1) / BLOCK_BYTES;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Copy `count` pieces from the page cache; return whether that could be done. */
static int pieces_from_cache(int file, size_t count, const struct piece *pieces, uint32_t *blocks,
    uint32_t (*crc32)(const void *, int, uint32_t))
{
    struct guarded here;
    volatile int whole = 0;
    if (!watch_bus_errors() || !map_pieces(file, count, pieces, &here))
        return 0;
    if (!sigsetjmp(here.back, 1)) {
        guarded = &here;
        __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the copy stays between the two */
        copy_pieces(&here, count, pieces, blocks, crc32);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        whole = 1;
    }
    guarded = NULL;
    munmap(here.from, here.size);
    return whole;
}

/* Read `count` pieces and store the CRC32C of each of their blocks, one piece after the other.
 *
 * `room` has space for a block. Return the number of pieces that were read to their ends. If that is
 * not all, `*found` is what was read of the next one, or the negative number of an error.
 */
size_t checked_pieces(int file, size_t count, const struct piece *pieces, char *room,
    uint32_t *blocks, uint32_t (*crc32)(const void *, int, uint32_t), int64_t *found)
{
    if (pieces_from_cache(file, count, pieces, blocks, crc32))
        return count;
    for (size_t i = 0; i < count; i++) {
        *found = read_piece(file, &pieces[i], room, blocks, crc32);
        if (*found < 0 || (uint64_t)*found < pieces[i].size + pieces[i].rest)
            return i;
        blocks += (pieces[i].size + BLOCK_BYTES - 1) / BLOCK_BYTES;
    }
    return count;
}
