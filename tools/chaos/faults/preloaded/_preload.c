/* Before the C library in every process of a job that is hurt: disks that fail, clocks that jump,
 * networks that are cut, slow, or change what they carry.
 *
 * What is hurt, and how, is read from a page of rules that all processes map and the harness
 * writes (preload.py says the layout; it must be the same in both). Without an active rule every
 * call costs one look at a number. What does not call the C library through the linker is not
 * reached: Go programs, stdio's own writes, memory that is mapped from files.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RULES 32
#define PIDS 64
#define PORTS 64
#define PATH_BYTES 512
#define HEAD 256

enum { OPEN_NEW = 1, OPEN_WRITE = 2, WRITE = 4, READ = 8, SYNC = 16, GROW = 32, NAME = 64 };
enum { FREE = 0, FAIL = 1, SLOW = 2, TEAR = 3, CLOCK = 4, CUT = 5, DELAY = 6, FLIP = 7 };

struct rule {
    _Atomic uint32_t kind;
    uint32_t ops;                  /* FAIL, SLOW: which calls. CUT: only from pids to ports, else
                                      all that crosses between pids with ports and others */
    int32_t error;                 /* FAIL: errno */
    _Atomic uint32_t taken;        /* TEAR: somebody did it */
    int64_t delay_ns;              /* SLOW, DELAY */
    double share;                  /* TEAR: of a write that arrives; CUT: of packets lost */
    int64_t since_ns, offset_ns;   /* CLOCK: the true time of the strike; the jump */
    double rate;                   /* CLOCK: seconds gained per second */
    double every_bytes;            /* FLIP: so many bytes lie between two bits, in the mean */
    uint64_t seed;                 /* FLIP: which bits these are; every rule has its own, not 0 */
    int32_t pids[PIDS];            /* whom; also their children. 0 ends the list */
    uint16_t ports[PORTS];         /* CUT, FLIP: where somebody listens. 0 ends the list */
    char folder[PATH_BYTES];       /* disk: below which; ends with a slash */
};

struct page {
    _Atomic uint32_t active;       /* how many rules are not FREE */
    uint32_t unused;
    _Atomic uint64_t flipped;      /* how many bits were changed on the wire so far */
    uint64_t unused_too[6];
    struct rule rules[RULES];
};

static struct page none, *page = &none;

__attribute__((constructor)) static void map_page(void) {
    const char *path = getenv("HOLDFAST_CHAOS_RULES");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED) page = found;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define QUIET (!atomic_load_explicit(&page->active, memory_order_relaxed))

static int among(const struct rule *rule, pid_t pid) {
    for (int i = 0; i < PIDS && rule->pids[i]; i++)
        if (rule->pids[i] == pid) return 1;
    return 0;
}

static int hits_us(const struct rule *rule) {
    return among(rule, getpid()) || among(rule, getppid());
}

static void pause_ns(int64_t ns) {
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    while (syscall(SYS_nanosleep, &left, &left) && errno == EINTR) {}
}

/* ---- disks ---- */

static int ends_with(const char *path, const char *ending) {
    size_t length = strlen(path), size = strlen(ending);
    return length >= size && !strcmp(path + length - size, ending);
}

static int below(const struct rule *rule, const char *path) {
    if (strncmp(path, rule->folder, strlen(rule->folder))) return 0;
    /* what tells what happened is left alone, and what gives orders */
    return !ends_with(path, ".jsonl") && !ends_with(path, ".log") && !ends_with(path, ".fifo");
}

/* Return the rule for an operation on a path, or NULL. `kinds` is a bit per kind. */
static struct rule *found(const char *path, uint32_t op, uint32_t kinds) {
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &page->rules[i];
        uint32_t kind = atomic_load_explicit(&rule->kind, memory_order_acquire);
        if (kind != FREE && kinds >> kind & 1 && rule->ops & op && below(rule, path) &&
            hits_us(rule))
            return rule;
    }
    return NULL;
}

static int suffers(const char *path, uint32_t op) {
    struct rule *rule = found(path, op, 1 << SLOW);
    if (rule) pause_ns(rule->delay_ns);
    rule = found(path, op, 1 << FAIL);
    if (rule) errno = rule->error;
    return rule != NULL;
}

static int path_of(int fd, char *path) {
    char link[64];
    if (fd <= 2) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0 || *path != '/') return 0;
    path[length] = 0;
    return 1;
}

static int fd_suffers(int fd, uint32_t op) {
    int before = errno;
    char path[PATH_MAX];
    if (QUIET || !path_of(fd, path) || !suffers(path, op)) {
        errno = before;
        return 0;
    }
    return 1;
}

/* Write the real path of a name that need not be there. */
static int real_name(int folder, const char *name, char *path) {
    char parent[PATH_MAX] = "", whole[PATH_MAX];
    if (*name != '/' && folder != AT_FDCWD) {
        if (!path_of(folder, parent)) return 0;
        strncat(parent, "/", sizeof parent - strlen(parent) - 1);
    }
    if (snprintf(whole, sizeof whole, "%s%s", parent, name) >= (int)sizeof whole) return 0;
    char *slash = strrchr(whole, '/');
    const char *last = slash ? slash + 1 : whole;
    if (slash) *slash = 0;
    if (!realpath(slash ? (slash == whole ? "/" : whole) : ".", parent)) return 0;
    return snprintf(path, PATH_MAX, "%s/%s", parent, last) < PATH_MAX;
}

static int name_suffers(int folder, const char *name, uint32_t op) {
    int before = errno;
    char path[PATH_MAX];
    if (QUIET || !real_name(folder, name, path) || !suffers(path, op)) {
        errno = before;
        return 0;
    }
    return 1;
}

static int open_suffers(int folder, const char *name, int flags) {
    uint32_t ops = flags & O_ACCMODE ? OPEN_WRITE : 0;
    if (QUIET) return 0;
    if (flags & O_CREAT) ops |= faccessat(folder, name, F_OK, 0) ? OPEN_NEW | OPEN_WRITE : 0;
    return ops && name_suffers(folder, name, ops);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, last); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) {
    REAL(open);
    MODE(flags, flags)
    return open_suffers(AT_FDCWD, name, flags) ? -1 : real(name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    REAL(open64);
    MODE(flags, flags)
    return open_suffers(AT_FDCWD, name, flags) ? -1 : real(name, flags, mode);
}
int openat(int folder, const char *name, int flags, ...) {
    REAL(openat);
    MODE(flags, flags)
    return open_suffers(folder, name, flags) ? -1 : real(folder, name, flags, mode);
}
int openat64(int folder, const char *name, int flags, ...) {
    REAL(openat64);
    MODE(flags, flags)
    return open_suffers(folder, name, flags) ? -1 : real(folder, name, flags, mode);
}

/* The first write below the folder arrives in part, and then the power is gone. */
static void tear(int fd, const struct iovec *parts, int count, int64_t at) {
    char path[PATH_MAX];
    size_t whole = 0;
    if (QUIET || !path_of(fd, path)) return;
    struct rule *rule = found(path, WRITE, 1 << TEAR);
    for (int i = 0; i < count; i++) whole += parts[i].iov_len;
    if (!rule || whole < 2 || atomic_exchange(&rule->taken, 1)) return;
    size_t left = (size_t)((double)whole * rule->share);
    for (int i = 0; i < count && left; i++) {
        size_t size = parts[i].iov_len < left ? parts[i].iov_len : left;
        if (at < 0)
            syscall(SYS_write, fd, parts[i].iov_base, size);
        else
            syscall(SYS_pwrite64, fd, parts[i].iov_base, size, at);
        at += at < 0 ? 0 : (int64_t)size;
        left -= size;
    }
    kill(getpid(), SIGKILL);
}

static void delay_send(int fd);
static char *told_rightly(int fd, const void *data, size_t *size);

#define WRITING(at) \
    if (!QUIET) { \
        struct iovec part = {(void *)data, size}; \
        tear(fd, &part, 1, at); \
        if (fd_suffers(fd, WRITE)) return -1; \
        delay_send(fd); \
    }
#define WRITING_PARTS(at) \
    if (!QUIET) { \
        tear(fd, parts, count, at); \
        if (fd_suffers(fd, WRITE)) return -1; \
        delay_send(fd); \
    }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    WRITING(-1)
    size_t length = size;
    char *right = QUIET ? NULL : told_rightly(fd, data, &length);
    if (!right) return real(fd, data, size);
    ssize_t written = real(fd, right, length);
    free(right);
    return written < 0 ? written : (ssize_t)size;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    WRITING(at)
    return real(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    WRITING(at)
    return real(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    WRITING_PARTS(-1)
    return real(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    REAL(pwritev);
    WRITING_PARTS(at)
    return real(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(pwritev64);
    WRITING_PARTS(at)
    return real(fd, parts, count, at);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    REAL(pwritev2);
    WRITING_PARTS(at)
    return real(fd, parts, count, at, flags);
}
ssize_t sendfile(int to, int from, off_t *at, size_t count) {
    REAL(sendfile);
    return fd_suffers(to, WRITE) ? -1 : real(to, from, at, count);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t count) {
    REAL(sendfile64);
    return fd_suffers(to, WRITE) ? -1 : real(to, from, at, count);
}
ssize_t copy_file_range(int from, off64_t *begin, int to, off64_t *at, size_t count, unsigned how) {
    REAL(copy_file_range);
    return fd_suffers(to, WRITE) ? -1 : real(from, begin, to, at, count, how);
}

ssize_t read(int fd, void *data, size_t size) {
    REAL(read);
    return fd_suffers(fd, READ) ? -1 : real(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    REAL(pread);
    return fd_suffers(fd, READ) ? -1 : real(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    REAL(pread64);
    return fd_suffers(fd, READ) ? -1 : real(fd, data, size, at);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
    REAL(preadv);
    return fd_suffers(fd, READ) ? -1 : real(fd, parts, count, at);
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(preadv64);
    return fd_suffers(fd, READ) ? -1 : real(fd, parts, count, at);
}

int fsync(int fd) {
    REAL(fsync);
    return fd_suffers(fd, SYNC) ? -1 : real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return fd_suffers(fd, SYNC) ? -1 : real(fd);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return fd_suffers(fd, GROW) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return fd_suffers(fd, GROW) ? -1 : real(fd, size);
}
int fallocate(int fd, int how, off_t at, off_t size) {
    REAL(fallocate);
    return fd_suffers(fd, GROW) ? -1 : real(fd, how, at, size);
}
int fallocate64(int fd, int how, off64_t at, off64_t size) {
    REAL(fallocate64);
    return fd_suffers(fd, GROW) ? -1 : real(fd, how, at, size);
}
int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(posix_fallocate);
    return fd_suffers(fd, GROW) ? errno : real(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    return fd_suffers(fd, GROW) ? errno : real(fd, at, size);
}

int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    return name_suffers(AT_FDCWD, name, OPEN_NEW | NAME) ? -1 : real(name, mode);
}
int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(mkdirat);
    return name_suffers(folder, name, OPEN_NEW | NAME) ? -1 : real(folder, name, mode);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return name_suffers(AT_FDCWD, to, NAME) ? -1 : real(from, to);
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(renameat);
    return name_suffers(other, to, NAME) ? -1 : real(folder, from, other, to);
}
int link(const char *from, const char *to) {
    REAL(link);
    return name_suffers(AT_FDCWD, to, NAME) ? -1 : real(from, to);
}
int linkat(int folder, const char *from, int other, const char *to, int flags) {
    REAL(linkat);
    return name_suffers(other, to, NAME) ? -1 : real(folder, from, other, to, flags);
}
int unlink(const char *name) {
    REAL(unlink);
    return name_suffers(AT_FDCWD, name, NAME) ? -1 : real(name);
}
int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat);
    return name_suffers(folder, name, NAME) ? -1 : real(folder, name, flags);
}
int rmdir(const char *name) {
    REAL(rmdir);
    return name_suffers(AT_FDCWD, name, NAME) ? -1 : real(name);
}

/* ---- the wall clock; CLOCK_MONOTONIC neither jumps nor drifts on a real machine ---- */

static int64_t gained_by(const struct rule *rule, int64_t now_ns) {
    return rule->offset_ns + (int64_t)((double)(now_ns - rule->since_ns) * rule->rate);
}

static int64_t gained_ns(int64_t now_ns) {
    int64_t gained = 0;
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &page->rules[i];
        if (atomic_load_explicit(&rule->kind, memory_order_acquire) == CLOCK && hits_us(rule))
            gained += gained_by(rule, now_ns);
    }
    return gained;
}

/* Return where the time of a line begins, 0 if it has none: {"t": of a hook's line, and "time_s":
 * near the beginning of an event's. */
static size_t time_at(const char *line, size_t size) {
    static const char hook[] = "{\"t\":", event[] = "{\"kind\":\"", time_s[] = ",\"time_s\":";
    if (size > sizeof hook && !memcmp(line, hook, sizeof hook - 1)) return sizeof hook - 1;
    if (size < sizeof event || memcmp(line, event, sizeof event - 1)) return 0;
    const char *found = memmem(line, size < HEAD ? size : HEAD, time_s, sizeof time_s - 1);
    return found ? (size_t)(found - line) + sizeof time_s - 1 : 0;
}

/* Return a line of a history with the true time in it, to be freed, where it has a wrong one; it
 * may be another process's line. Who judges compares the times of processes with each other. */
static char *told_rightly(int fd, const void *data, size_t *size) {
    const size_t ahead = time_at(data, *size);
    char path[PATH_MAX], number[32], *end;
    int before = errno;
    if (!ahead || *size < ahead + sizeof number) return NULL;
    memcpy(number, (const char *)data + ahead, sizeof number - 1);
    number[sizeof number - 1] = 0;
    double t = strtod(number, &end), now = 0;
    int is_history = path_of(fd, path) && ends_with(path, ".jsonl"), changed = 0;
    errno = before;
    struct timespec clock;
    if (!is_history || *end != ',' || syscall(SYS_clock_gettime, CLOCK_REALTIME, &clock))
        return NULL;
    now = (double)clock.tv_sec + (double)clock.tv_nsec / 1e9;
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &page->rules[i];
        if (atomic_load_explicit(&rule->kind, memory_order_acquire) != CLOCK) continue;
        double gained = (double)gained_by(rule, (int64_t)(now * 1e9)) / 1e9, late = t - now;
        if ((late - gained) * (late - gained) >= late * late) continue;
        t -= gained;
        changed = 1;
    }
    size_t old = (size_t)(end - number) + ahead;
    char *right = changed ? malloc(*size + sizeof number) : NULL;
    if (!right) return NULL;
    memcpy(right, data, ahead);
    int head = (int)ahead + snprintf(right + ahead, sizeof number, "%.6f", t);
    memcpy(right + head, (const char *)data + old, *size - old);
    *size = (size_t)head + *size - old;
    return right;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    REAL(clock_gettime);
    int status = real(which, now);
    if (status || QUIET || (which != CLOCK_REALTIME && which != CLOCK_REALTIME_COARSE))
        return status;
    int64_t ns = now->tv_sec * INT64_C(1000000000) + now->tv_nsec;
    ns += gained_ns(ns);
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return 0;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *where) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (where) *where = found.tv_sec;
    return found.tv_sec;
}

/* ---- the network ---- */

static int is_tcp(int fd) {
    int type = 0, family = 0;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM) return 0;
    size = sizeof family;
    return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) &&
           (family == AF_INET || family == AF_INET6);
}

static void delay_send(int fd) {
    int before = errno;
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &page->rules[i];
        if (atomic_load_explicit(&rule->kind, memory_order_acquire) == DELAY && hits_us(rule) &&
            is_tcp(fd))
            pause_ns(rule->delay_ns);
    }
    errno = before;
}

static uint16_t port_of(const struct sockaddr *to) {
    if (to->sa_family == AF_INET) return ntohs(((const struct sockaddr_in *)to)->sin_port);
    if (to->sa_family == AF_INET6) return ntohs(((const struct sockaddr_in6 *)to)->sin6_port);
    return 0;
}

/* Where a thread stands with a rule that flips bits: how many bytes pass before the next one. */
struct flips {
    uint64_t seed, state;
    double left;
};

static uint64_t drawn(struct flips *flips) { /* SplitMix64 (Steele, Lea, Flood: OOPSLA 2014) */
    uint64_t z = flips->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double pause_bytes(struct flips *flips, const struct rule *rule) {
    return (double)(drawn(flips) >> 11) * 0x1p-53 * 2 * rule->every_bytes;
}

/* Let bytes pass; flip what is to be flipped in them, where they are given. Return how many bits. */
static uint64_t pass(struct flips *flips, const struct rule *rule, char *data, size_t size) {
    uint64_t count = 0;
    for (; flips->left < (double)size; count++) {
        size_t at = (size_t)flips->left;
        int bit = (int)(drawn(flips) & 7);
        if (data) data[at] = (char)(data[at] ^ 1 << bit);
        flips->left += 1 + pause_bytes(flips, rule);
    }
    flips->left -= (double)size;
    return count;
}

/* Return this thread's place in the rule that hits a connection of ours, or NULL. */
static struct flips *flips_of(int fd, const struct rule **rule) {
    static __thread struct flips mine[RULES];
    static __thread uint64_t number;
    static _Atomic uint64_t threads;
    struct sockaddr_storage far;
    socklen_t length = sizeof far;
    uint16_t port = 0;
    int before = errno;
    for (int i = 0; i < RULES; i++) {
        *rule = &page->rules[i];
        uint32_t kind = atomic_load_explicit(&(*rule)->kind, memory_order_acquire);
        if (kind != FLIP || !hits_us(*rule)) continue;
        if (!port && !getpeername(fd, (struct sockaddr *)&far, &length))
            port = port_of((struct sockaddr *)&far);
        errno = before;
        if (!port) return NULL;
        for (int j = 0; j < PORTS && (*rule)->ports[j]; j++) {
            if ((*rule)->ports[j] != port) continue;
            if (mine[i].seed != (*rule)->seed) {
                if (!number) number = 1 + atomic_fetch_add(&threads, 1);
                mine[i].seed = (*rule)->seed;
                mine[i].state = (*rule)->seed + number * UINT64_C(0xd1342543de82ef95);
                mine[i].left = pause_bytes(&mine[i], *rule);
            }
            return &mine[i];
        }
    }
    return NULL;
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    if (QUIET) return real(fd, data, size, flags);
    delay_send(fd);
    const struct rule *rule;
    struct flips *flips = flips_of(fd, &rule);
    char *changed = flips && flips->left < (double)size ? malloc(size) : NULL;
    if (changed) {
        struct flips ahead = *flips; /* what the kernel does not take is sent again, unchanged */
        memcpy(changed, data, size);
        pass(&ahead, rule, changed, size);
    }
    ssize_t sent = real(fd, changed ? changed : data, size, flags);
    if (flips && sent > 0 && (changed || flips->left >= (double)size))
        atomic_fetch_add(&page->flipped, pass(flips, rule, NULL, (size_t)sent));
    int after = errno;
    free(changed);
    errno = after;
    return sent;
}
ssize_t recv(int fd, void *data, size_t size, int flags) {
    REAL(recv);
    ssize_t got = real(fd, data, size, flags);
    const struct rule *rule;
    if (QUIET || got <= 0 || flags & MSG_PEEK) return got;
    struct flips *flips = flips_of(fd, &rule);
    if (flips) atomic_fetch_add(&page->flipped, pass(flips, rule, data, (size_t)got));
    return got;
}
ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to,
               socklen_t length) {
    REAL(sendto);
    if (!QUIET) delay_send(fd);
    return real(fd, data, size, flags, to, length);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    if (!QUIET) delay_send(fd);
    return real(fd, message, flags);
}

/* Before a connection begins that would cross a cut: have the kernel drop what comes back. */
static void cut_off(int fd, uint16_t port) {
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &page->rules[i];
        if (atomic_load_explicit(&rule->kind, memory_order_acquire) != CUT) continue;
        int theirs = 0;
        for (int j = 0; j < PORTS && rule->ports[j]; j++) theirs |= rule->ports[j] == port;
        int ours = hits_us(rule);
        if (!(rule->ops ? ours && theirs : ours != theirs) || !is_tcp(fd)) continue;
        double most = 4294967295.0;
        struct sock_filter lossy[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(SKF_AD_OFF + SKF_AD_RANDOM)),
            BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)(rule->share * most), 1, 0),
            BPF_STMT(BPF_RET | BPF_K, 0),
            BPF_STMT(BPF_RET | BPF_K, 0xffffffff),
        };
        struct sock_filter deaf[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
        struct sock_fprog program = {4, lossy}, all = {1, deaf};
        setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, rule->share < 1 ? &program : &all,
                   sizeof program);
    }
}

int connect(int fd, const struct sockaddr *to, socklen_t length) {
    REAL(connect);
    uint16_t port = QUIET || !to ? 0 : port_of(to);
    int before = errno;
    if (port) cut_off(fd, port);
    errno = before;
    return real(fd, to, length);
}
