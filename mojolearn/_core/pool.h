/* A small thread pool whose caller never waits for a worker that has not joined.
 *
 * A job hands out its own work by an atomic counter, so it is complete when the caller's own call of it returns and
 * the workers that joined have returned; a worker that wakes too late finds the job closed. The worst case is
 * therefore the serial time plus the cost of a wake-up. One job runs at a time: a second caller, and a job started
 * from inside a job, run alone in their own thread. After a fork the child starts with no workers and makes its own.
 *
 * A long job is run in turns: once the time of a turn is over its threads get no more units and come back, the caller
 * looks for signals, and the job is called again. It goes on where its counter stands.
 */
#ifndef MOJOLEARN_POOL_H
#define MOJOLEARN_POOL_H
#include "simd.h"

typedef void (*pool_job)(void *arg, int thread);

#define POOL_TURN 200000000 /* nanoseconds; much longer than the longest unit of most jobs, so that few threads idle */
#define POOL_NO_UNIT ((ptrdiff_t)1 << 40) /* beyond every unit, and small enough to be multiplied */

typedef struct {
    int64_t end;
    int over; /* a thread was refused a unit */
} pool_turn;

#if defined(_WIN32)
/* no POSIX threads: every job runs in the calling thread */
static void pool_run(pool_job job, void *arg, int threads, pool_turn *turn) {
    (void)threads, (void)turn;
    uint64_t saved = fp_enter();
    job(arg, 0);
    fp_leave(saved);
}
static void pool_turn_begin(pool_turn *turn) { turn->over = 0; }
static ptrdiff_t pool_next_unit(ptrdiff_t *counter) { return next_unit(counter); }
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define POOL_MAX_THREADS 256
/* about 0.3 ms of looking before a thread sleeps: longer than the Python code between two steps, and a wake-up costs as
 * much as a third of a step of a small model */
#define POOL_SPINS 20000

/* state of the open job: bit 63 closed; bits 32-47 workers wanted; 16-31 joined so far; 0-15 still inside */
#define POOL_CLOSED (UINT64_C(1) << 63)
#define POOL_WANTED(s) (((s) >> 32) & 0xffff)
#define POOL_JOINED(s) (((s) >> 16) & 0xffff)
#define POOL_INSIDE(s) ((s)&0xffff)

static struct {
    _Atomic uint64_t state;
    _Atomic uint32_t generation; /* counts jobs; workers wait for it to change */
    _Atomic int sleepers;
    atomic_flag busy;
    pool_job job;
    void *arg;
    pool_turn *turn;
    int workers;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} pool = {.state = POOL_CLOSED,
          .busy = ATOMIC_FLAG_INIT,
#if !defined(__linux__)
          .mutex = PTHREAD_MUTEX_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER,
#endif
};

static _Thread_local pool_turn *pool_this_turn; /* of the job that this thread is in; NULL: it has all the time */

static int64_t pool_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pool_turn_begin(pool_turn *turn) {
    turn->end = pool_now() + POOL_TURN;
    turn->over = 0;
}

/* next_unit, or POOL_NO_UNIT when the turn is over */
static ptrdiff_t pool_next_unit(ptrdiff_t *counter) {
    pool_turn *turn = pool_this_turn;
    if (turn && pool_now() >= turn->end) {
        __atomic_store_n(&turn->over, 1, __ATOMIC_RELAXED);
        return POOL_NO_UNIT;
    }
    return next_unit(counter);
}

static void pool_call(pool_job job, void *arg, int thread, pool_turn *turn) {
    pool_turn *outer = pool_this_turn;
    pool_this_turn = turn;
    job(arg, thread);
    pool_this_turn = outer;
}

static void pool_sleep(uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &pool.generation, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
#else
    pthread_mutex_lock(&pool.mutex);
    while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.changed, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
#endif
}

static void pool_wake(int n) {
#if defined(__linux__)
    syscall(SYS_futex, &pool.generation, FUTEX_WAKE_PRIVATE, n, 0, 0, 0);
#else
    (void)n;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.mutex);
#endif
}

static void *pool_worker(void *first) {
    uint32_t seen = (uint32_t)(uintptr_t)first;
    for (;;) {
        uint32_t now;
        int spins = 0;
        while ((now = atomic_load_explicit(&pool.generation, memory_order_acquire)) == seen && spins < POOL_SPINS) {
            cpu_relax();
            spins++;
        }
        if (now == seen) {
            atomic_fetch_add(&pool.sleepers, 1);
            while ((now = atomic_load(&pool.generation)) == seen) pool_sleep(seen);
            atomic_fetch_sub(&pool.sleepers, 1);
        }
        seen = now;
        uint64_t state = atomic_load(&pool.state);
        while (!(state & POOL_CLOSED) && POOL_JOINED(state) < POOL_WANTED(state)) {
            if (atomic_compare_exchange_weak(&pool.state, &state, state + (1 << 16) + 1)) {
                uint64_t saved = fp_enter();
                pool_call(pool.job, pool.arg, (int)POOL_JOINED(state) + 1, pool.turn);
                fp_leave(saved);
                atomic_fetch_sub_explicit(&pool.state, 1, memory_order_release);
                break;
            }
        }
    }
    return NULL;
}

static void pool_after_fork(void) {
    pool.workers = 0;
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.state, POOL_CLOSED);
    atomic_flag_clear(&pool.busy);
#if !defined(__linux__)
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.changed, NULL);
#endif
}

static int pool_start(void) { return pthread_atfork(NULL, NULL, pool_after_fork); }

static void pool_add_workers(int wanted) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, old;
    sigfillset(&all); /* signals belong to the threads of the interpreter */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool.workers < wanted) {
        pthread_t thread;
        uint32_t generation = atomic_load(&pool.generation);
        if (pthread_create(&thread, &attributes, pool_worker, (void *)(uintptr_t)generation)) break;
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
}

/* Runs job(arg, 0) here and job(arg, t), 0 < t < threads, in as many workers as come in time; all in exact mode. */
static void pool_run(pool_job job, void *arg, int threads, pool_turn *turn) {
    uint64_t saved = fp_enter();
    if (threads > POOL_MAX_THREADS) threads = POOL_MAX_THREADS;
    if (threads <= 1 || atomic_flag_test_and_set_explicit(&pool.busy, memory_order_acquire)) {
        pool_call(job, arg, 0, turn);
        fp_leave(saved);
        return;
    }
    if (pool.workers < threads - 1) pool_add_workers(threads - 1);
    pool.job = job;
    pool.arg = arg;
    pool.turn = turn;
    atomic_store(&pool.state, (uint64_t)(threads - 1) << 32);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers)) pool_wake(threads - 1);
    pool_call(job, arg, 0, turn);
    atomic_fetch_or(&pool.state, POOL_CLOSED);
    for (int spins = 0; POOL_INSIDE(atomic_load_explicit(&pool.state, memory_order_acquire));) {
        if (spins++ < POOL_SPINS) cpu_relax();
        else sched_yield();
    }
    atomic_flag_clear_explicit(&pool.busy, memory_order_release);
    fp_leave(saved);
}
#endif
#endif
