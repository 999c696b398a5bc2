/* Counts the bytes that torch's CPU allocator gives out, on all threads: preload it, see stage_budgets.py.
   torch allocates with posix_memalign at 64 bytes and returns with free. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1 << 20)
#define GONE ((void *)1)
static void *addresses[SLOTS];
static size_t sizes[SLOTS];
static long now, most;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t slot(void *at) { return (((uintptr_t)at >> 6) * 0x9E3779B97F4A7C15ULL >> 40) & (SLOTS - 1); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    static int (*real)(void **, size_t, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real(out, alignment, size);
    if (!failed && alignment == 64) {
        pthread_mutex_lock(&lock);
        size_t k = slot(*out);
        while (addresses[k] && addresses[k] != GONE) k = (k + 1) & (SLOTS - 1);
        addresses[k] = *out;
        sizes[k] = size;
        now += size;
        if (now > most) most = now;
        pthread_mutex_unlock(&lock);
    }
    return failed;
}

void free(void *at) {
    static void (*real)(void *);
    if (!real) real = dlsym(RTLD_NEXT, "free");
    if (at && !((uintptr_t)at & 63)) {
        pthread_mutex_lock(&lock);
        size_t k = slot(at);
        while (addresses[k] && addresses[k] != at) k = (k + 1) & (SLOTS - 1);
        if (addresses[k] == at) {
            addresses[k] = GONE;
            now -= sizes[k];
        }
        pthread_mutex_unlock(&lock);
    }
    real(at);
}

long allocated_bytes(void) { return now; }
long most_allocated_bytes(void) { return most; }
void reset_most_allocated(void) { most = now; }
