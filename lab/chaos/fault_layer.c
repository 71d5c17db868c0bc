/* Fault layer for LD_PRELOAD: steps the wall clock, and delays or hangs file calls under one folder.

   CHAOS_LAYER   a file of three int64: offset of the wall clock (ns), delay of a file call (us), hung (0 or 1)
   CHAOS_FOLDER  file calls under this path are delayed or hang

   The file is mapped, so that the runner can change the values while the process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HUNG_LOOK_US 20000
#define NS_PER_S 1000000000LL

struct control {
    volatile int64_t clock_offset_ns, delay_us, is_hung;
};

static struct control nothing, *control = &nothing;
static const char *folder = NULL;

#define REAL(name) \
    static __typeof__(&name) real = NULL; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("CHAOS_LAYER");
    folder = getenv("CHAOS_FOLDER");
    if (path == NULL || folder == NULL) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(fd);
}

static void inject_for_path(const char *path) {
    if ((control->delay_us == 0 && !control->is_hung) || strncmp(path, folder, strlen(folder)) != 0) return;
    if (control->delay_us > 0) usleep(control->delay_us);
    while (control->is_hung) usleep(HUNG_LOOK_US);
}

static void inject_for_file(int fd) {
    char link[64], path[4096];
    if (control->delay_us == 0 && !control->is_hung) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    inject_for_path(path);
}

#define FILE_CALL(type, name, parameters, arguments) \
    type name parameters { \
        REAL(name); \
        inject_for_file(fd); \
        return real arguments; \
    }

FILE_CALL(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size))
FILE_CALL(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
FILE_CALL(ssize_t, readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FILE_CALL(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FILE_CALL(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
FILE_CALL(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FILE_CALL(int, fsync, (int fd), (fd))

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    inject_for_path(path);
    return real(path, flags, mode);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    inject_for_path(to);
    return real(from, to);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * NS_PER_S + now->tv_nsec + control->clock_offset_ns;
        now->tv_sec = ns / NS_PER_S;
        now->tv_nsec = ns % NS_PER_S;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec ns;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &ns);
    now->tv_sec = ns.tv_sec;
    now->tv_usec = ns.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
