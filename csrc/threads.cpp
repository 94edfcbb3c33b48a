#include "threads.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace triforce {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto spin_time = std::chrono::microseconds(250);  // of a worker without work: longer than between passes
constexpr int spins_per_clock_read = 64;                    // some 2 microseconds

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Spins until ready() or until the time is up. Returns whether it became ready.
template <class Ready>
bool spin(Ready ready) {
    const auto deadline = Clock::now() + spin_time;
    do {
        for (int i = 0; i < spins_per_clock_read; i++) {
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < deadline);
    return false;
}

int usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

class Pool {
  public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
    }

    ~Pool() {
        stop_ = true;
        wake();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    void run(int chunks, void (*body)(const void*, int), const void* context) {
        body_.store(body, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        chunks_.store(chunks, std::memory_order_relaxed);
        unfinished_.store(chunks, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_ = job << 32 | static_cast<uint32_t>(chunks);
        if (sleeping_) wake();
        while (take_chunk()) {
        }
        const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
        while (!spin(finished)) std::this_thread::yield();  // the thread with the last chunk may need this CPU
    }

  private:
    // The ticket holds the job's number and how many of its chunks are unclaimed. A claim succeeds only on the very
    // ticket that was read before the other three, so it never runs a chunk of one job with the body of another.
    bool take_chunk() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(ticket)) {
            const auto body = body_.load(std::memory_order_relaxed);
            const auto context = context_.load(std::memory_order_relaxed);
            const int chunks = chunks_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            body(context, chunks - static_cast<int>(static_cast<uint32_t>(ticket)));
            unfinished_.fetch_sub(1, std::memory_order_release);
            return true;
        }
        return false;
    }

    bool called() const { return stop_ || static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed)); }

    void work();
    void sleep();
    void wake();

    alignas(64) std::atomic<uint64_t> ticket_{0};
    std::atomic<void (*)(const void*, int)> body_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int> chunks_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_up_;
    std::vector<std::thread> workers_;
};

thread_local bool in_job = false;  // nested jobs run inline

void Pool::work() {
    in_job = true;
    while (!stop_) {
        while (take_chunk()) {
        }
        if (!spin([this] { return called(); })) sleep();
    }
}

// Sequentially consistent: either the worker sees the ticket before it sleeps, or run() sees the worker asleep.
void Pool::sleep() {
    std::unique_lock lock(mutex_);
    ++sleeping_;
    wake_up_.wait(lock, [this] { return stop_ || static_cast<uint32_t>(ticket_.load()); });
    --sleeping_;
}

void Pool::wake() {
    { std::lock_guard lock(mutex_); }
    wake_up_.notify_all();
}

// Never destroyed: at exit a worker may still spin on it. A forked child has none of the parent's workers, and another
// thread may have held the lock, so that it makes a pool and a lock of its own.
struct State {
    std::mutex in_use;
    Pool* pool = nullptr;
    std::atomic<int> threads{usable_cpus()};  // read without the lock, too
};

State*& state() {
    static State* it = [] {
        pthread_atfork(nullptr, nullptr, [] {
            in_job = false;
            state() = new State{{}, nullptr, {state()->threads.load()}};
        });
        return new State;
    }();
    return it;
}

}  // namespace

int threads() { return state()->threads; }

void set_threads(int count) {
    if (count < 1) throw std::invalid_argument("threads must be at least 1");
    State& s = *state();
    std::lock_guard lock(s.in_use);
    s.threads = count;
    delete s.pool;
    s.pool = nullptr;
}

void run_chunks(int chunks, void (*body)(const void*, int), const void* context) {
    State& s = *state();
    std::unique_lock lock(s.in_use, std::defer_lock);
    if (chunks > 1 && !in_job && s.threads > 1 && lock.try_lock()) {
        if (!s.pool) s.pool = new Pool(s.threads);
        in_job = true;
        s.pool->run(chunks, body, context);
        in_job = false;
        return;
    }
    for (int chunk = 0; chunk < chunks; chunk++) body(context, chunk);
}

}  // namespace triforce
