/* Pieces of a file, read and checksummed by blocks in one call. A part of `_stream.c`.
 *
 * A restore reads a few hundred pieces of a few hundred kilobytes: one call for all of them leaves
 * the interpreter to the other threads.
 */

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

/* Read `count` pieces and store the CRC32C of each of their blocks, one piece after the other.
 *
 * `room` has space for a block. Return the number of pieces that were read to their ends. If that is
 * not all, `*found` is what was read of the next one, or the negative number of an error.
 */
size_t checked_pieces(int file, size_t count, const struct piece *pieces, char *room,
    uint32_t *blocks, uint32_t (*crc32)(const void *, int, uint32_t), int64_t *found)
{
    for (size_t i = 0; i < count; i++) {
        *found = read_piece(file, &pieces[i], room, blocks, crc32);
        if (*found < 0 || (uint64_t)*found < pieces[i].size + pieces[i].rest)
            return i;
        blocks += (pieces[i].size + BLOCK_BYTES - 1) / BLOCK_BYTES;
    }
    return count;
}
