/* Preloaded below a program: system calls that fail.
 *
 * The program sets what it wants by fault_set, found in itself: the n-th call from now
 * on of a name on a file whose path holds a text fails with an error, and all after it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char fault_call[32], fault_path[256];
static int fault_errno, fault_after, fault_hits;

void fault_set(const char *call, const char *path, int error, int after) {
  pthread_mutex_lock(&lock);
  snprintf(fault_call, sizeof fault_call, "%s", call);
  snprintf(fault_path, sizeof fault_path, "%s", path);
  fault_errno = error;
  fault_after = after;
  fault_hits = 0;
  pthread_mutex_unlock(&lock);
}

int fault_count(void) { return fault_hits; }

static int fails(const char *call, int fd) {
  char link[64], path[4096];
  if (!fault_errno || strcmp(call, fault_call)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (!strstr(path, fault_path)) return 0;
  pthread_mutex_lock(&lock);
  const int now = fault_errno && fault_after-- <= 0;
  fault_hits += now;
  pthread_mutex_unlock(&lock);
  return now;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define GUARDED(result, name, called, parameters, arguments) \
  result name parameters {                                   \
    if (fails(called, fd)) {                                 \
      errno = fault_errno;                                   \
      return -1;                                             \
    }                                                        \
    return REAL(name) arguments;                             \
  }

/* While a call is to fail, none is hidden among asynchronous ones: they are refused. */
long syscall(long number, ...) {
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_io_submit && fault_errno) {
    errno = ENOSYS;
    return -1;
  }
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

GUARDED(ssize_t, preadv, "preadv", (int fd, const struct iovec *v, int n, off_t o),
        (fd, v, n, o))
GUARDED(ssize_t, preadv64, "preadv", (int fd, const struct iovec *v, int n, off64_t o),
        (fd, v, n, o))
GUARDED(ssize_t, pwritev, "pwritev", (int fd, const struct iovec *v, int n, off_t o),
        (fd, v, n, o))
GUARDED(ssize_t, pwritev64, "pwritev",
        (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
GUARDED(ssize_t, preadv2, "preadv",
        (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
GUARDED(ssize_t, preadv64v2, "preadv",
        (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
GUARDED(ssize_t, pwritev2, "pwritev",
        (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
GUARDED(ssize_t, pwritev64v2, "pwritev",
        (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
GUARDED(ssize_t, write, "write", (int fd, const void *b, size_t n), (fd, b, n))
GUARDED(int, fsync, "fsync", (int fd), (fd))
GUARDED(int, fdatasync, "fdatasync", (int fd), (fd))
GUARDED(int, flock, "flock", (int fd, int operation), (fd, operation))
GUARDED(int, syncfs, "syncfs", (int fd), (fd))
