/* Threads that wait without spinning for long, and per-thread scratch memory.
 *
 * A job is a counter that every thread draws from. Workers look for the next job for some ten microseconds (the operations
 * of one step follow each other closely) and then sleep on a futex. A second caller that finds the pool taken computes
 * its job alone: several engines in one process stay correct, and are meant to have pools of their own, in processes. So
 * does the body of a job with what it calls: who has rows of its own shares them with nobody. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "baton.h"

enum { MAX_THREADS = 256, SPINS = 500, LARGE_PAGE = 2 << 20 };
#define CLOSED 0x80000000u

static struct {
    pthread_mutex_t lock; /* held by the caller whose job is running */
    int num_workers;
    void (*body)(void *, int64_t);
    void *context;
    int64_t count;
    _Atomic int64_t next;
    _Atomic uint32_t generation; /* of jobs; workers wait for it to change */
    _Atomic uint32_t members;    /* workers in the job, and CLOSED once it has nothing left to draw */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t stop;
    pthread_t threads[MAX_THREADS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .members = CLOSED};

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
static void wait_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}
#else
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_over = PTHREAD_COND_INITIALIZER;

static void wait_while(_Atomic uint32_t *word, uint32_t value)
{
    pthread_mutex_lock(&sleep_lock);
    while (atomic_load(word) == value)
        pthread_cond_wait(&sleep_over, &sleep_lock);
    pthread_mutex_unlock(&sleep_lock);
}

static void wake_all(_Atomic uint32_t *word)
{
    (void)word;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&sleep_over);
    pthread_mutex_unlock(&sleep_lock);
}
#endif

static void wait_for_change(_Atomic uint32_t *word, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return;
        pause_briefly();
    }
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(word) == seen)
        wait_while(word, seen);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void draw(void)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (i >= pool.count)
            return;
        pool.body(pool.context, i);
    }
}

/* A worker that wakes up late finds the job closed: nobody waits for it. */
static bool join_job(void)
{
    uint32_t members = atomic_load(&pool.members);
    while (!(members & CLOSED))
        if (atomic_compare_exchange_weak(&pool.members, &members, members + 1))
            return true;
    return false;
}

static void *work(void *first_generation)
{
    uint32_t seen = (uint32_t)(uintptr_t)first_generation;
    for (;;) {
        wait_for_change(&pool.generation, seen);
        seen = atomic_load_explicit(&pool.generation, memory_order_acquire);
        if (atomic_load(&pool.stop))
            return NULL;
        if (join_job()) {
            draw();
            atomic_fetch_sub_explicit(&pool.members, 1, memory_order_release);
        }
    }
}

static void start_job(void)
{
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers) > 0)
        wake_all(&pool.generation);
}

void parallel(int64_t count, void (*body)(void *, int64_t), void *context)
{
    if (count <= 1 || pool.num_workers == 0 || pthread_mutex_trylock(&pool.lock) != 0) {
        for (int64_t i = 0; i < count; i++)
            body(context, i);
        return;
    }
    pool.body = body;
    pool.context = context;
    pool.count = count;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store(&pool.members, 0);
    start_job();
    draw();
    atomic_fetch_or(&pool.members, CLOSED);
    for (int spins = 0; atomic_load_explicit(&pool.members, memory_order_acquire) != CLOSED; spins++)
        spins < SPINS ? pause_briefly() : (void)sched_yield(); /* the rest of a job is short */
    pthread_mutex_unlock(&pool.lock);
}

int64_t num_threads(void)
{
    return pool.num_workers + 1;
}

#if defined(__linux__)
/* Worker i of the pool goes to the (i + 1)-th core that the process may use; the caller's thread is left alone. */
static void pin(pthread_t thread, int index)
{
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2)
        return;
    int skip = (index + 1) % CPU_COUNT(&allowed);
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, &allowed) || skip-- > 0)
            continue;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        pthread_setaffinity_np(thread, sizeof one, &one);
        return;
    }
}
#else
static void pin(pthread_t thread, int index)
{
    (void)thread;
    (void)index;
}
#endif

/* Computes with `count` threads from now on, the caller's included. Returns how many there are. */
int64_t baton_set_num_threads(int64_t count)
{
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.stop, 1);
    start_job();
    for (int i = 0; i < pool.num_workers; i++)
        pthread_join(pool.threads[i], NULL);
    atomic_store(&pool.stop, 0);
    pool.num_workers = 0;
    void *generation = (void *)(uintptr_t)atomic_load(&pool.generation);
    for (int i = 0; i + 1 < count && i < MAX_THREADS; i++) {
        if (pthread_create(&pool.threads[i], NULL, work, generation) != 0)
            break;
        pin(pool.threads[i], i);
        pool.num_workers++;
    }
    pthread_mutex_unlock(&pool.lock);
    return num_threads();
}

struct memory {
    void *data[NUM_SCRATCH_SLOTS];
    size_t bytes[NUM_SCRATCH_SLOTS];
};

static pthread_key_t memory_key;
static pthread_once_t memory_once = PTHREAD_ONCE_INIT;

static void free_memory(void *value)
{
    struct memory *memory = value;
    for (int slot = 0; slot < NUM_SCRATCH_SLOTS; slot++)
        free(memory->data[slot]);
    free(memory);
}

static void make_memory_key(void)
{
    if (pthread_key_create(&memory_key, free_memory) != 0)
        abort();
}

static struct memory *memory_of_thread(void)
{
    pthread_once(&memory_once, make_memory_key);
    struct memory *memory = pthread_getspecific(memory_key);
    if (memory == NULL) {
        memory = calloc(1, sizeof *memory);
        if (memory == NULL || pthread_setspecific(memory_key, memory) != 0)
            abort();
    }
    return memory;
}

/* Where it fails, pages are small. */
static void ask_for_large_pages(void *data, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

void *scratch(int slot, size_t bytes)
{
    struct memory *memory = memory_of_thread();
    if (memory->bytes[slot] < bytes) {
        size_t wanted = bytes + bytes / 2, page = wanted >= LARGE_PAGE / 4 ? LARGE_PAGE : 4096;
        size_t rounded = (wanted + page - 1) & ~(page - 1);
        free(memory->data[slot]);
        if (posix_memalign(&memory->data[slot], page, rounded) != 0)
            abort(); /* the caller could only fail as well */
        if (page == LARGE_PAGE)
            ask_for_large_pages(memory->data[slot], rounded);
        memory->bytes[slot] = rounded;
    }
    return memory->data[slot];
}
