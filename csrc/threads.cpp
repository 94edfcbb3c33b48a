#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include <pthread.h>

#include "cpus.hpp"

namespace triforce {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto patience = std::chrono::microseconds(250);  // spinning without work: longer than between passes
constexpr auto time_slice = std::chrono::milliseconds(1);  // least time for which another process takes a CPU
constexpr Clock::duration shortest_crowd = std::chrono::milliseconds(10), longest_crowd = std::chrono::seconds(1);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Whether other processes compete for the CPUs. A notice counts for a short while; the next notice counts for twice as
/// long if it follows soon.
class Crowd {
  public:
    bool is_present(Clock::time_point now) const { return since_epoch(now) < until_.load(std::memory_order_relaxed); }

    void notice(Clock::time_point now) {
        const Clock::rep until = until_.load(std::memory_order_relaxed),
                         last_duration = duration_.load(std::memory_order_relaxed);
        const bool recurs = since_epoch(now) - until < last_duration;
        const Clock::rep duration =
            recurs ? std::min(2 * last_duration, longest_crowd.count()) : shortest_crowd.count();
        duration_.store(duration, std::memory_order_relaxed);
        until_.store(since_epoch(now) + duration, std::memory_order_relaxed);
    }

  private:
    static Clock::rep since_epoch(Clock::time_point time) { return time.time_since_epoch().count(); }

    std::atomic<Clock::rep> until_{0}, duration_{0};
};

class Pool {
  public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
    }

    ~Pool() {
        stop_ = true;
        wake(called_);
        for (std::thread& worker : workers_) worker.join();
    }

    void run(int chunks, void (*body)(const void*, int), const void* context) {
        body_.store(body, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        chunks_.store(chunks, std::memory_order_relaxed);
        unfinished_.store(chunks, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_ = job << 32 | static_cast<uint32_t>(chunks);
        if (sleeping_) wake(called_);
        if (!take_chunks(waited_, [this] { return finished(); })) sleep_until_finished();
    }

  private:
    // The ticket holds the job's number and the number of its unclaimed chunks. A claim succeeds only if the ticket is
    // the one that was read before `body`, `context` and `chunks`. So no chunk of one job runs with the body of another
    // job.
    bool take_chunk() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(ticket)) {
            const auto body = body_.load(std::memory_order_relaxed);
            const auto context = context_.load(std::memory_order_relaxed);
            const int chunks = chunks_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            body(context, chunks - static_cast<int>(static_cast<uint32_t>(ticket)));
            if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == caller_sleeps + 1) wake(finished_);
            return true;
        }
        return false;
    }

    /// Takes chunks while there are any, then spins until ready(). Returns false if spinning takes too long.
    ///
    /// A thread spins for the chunks of other threads as long as it has worked since its last wait, at least a time
    /// slice. A thread that needs longer for a chunk has lost its CPU, perhaps to a thread that spins. In a crowd all
    /// threads therefore sleep almost at once.
    template <class Ready>
    bool take_chunks(Clock::time_point& waited, Ready ready) {
        bool worked = false;
        while (take_chunk()) worked = true;
        if (spin(ready)) return true;  // without the clock, which costs as much as a small chunk
        const auto began = Clock::now();
        const auto for_others = std::max<Clock::duration>(time_slice, began - waited);
        waited = began;
        if (crowd_.is_present(began)) return false;
        while (waited - began < (finished() ? patience : for_others)) {
            if (spin(ready)) return true;
            waited = Clock::now();
        }
        if (worked && !finished()) crowd_.notice(waited);
        return false;
    }

    /// Spins for about 2 microseconds, or until ready(). Returns whether it became ready.
    template <class Ready>
    static bool spin(Ready ready) {
        for (int i = 0; i < 64; i++) {
            if (ready()) return true;
            pause();
        }
        return false;
    }

    bool called() const { return stop_ || static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed)); }
    bool finished() const { return !(unfinished_.load(std::memory_order_acquire) & ~caller_sleeps); }

    void work();
    void sleep_until_called();
    void sleep_until_finished();
    void wake(std::condition_variable& sleepers);

    static constexpr uint32_t caller_sleeps = uint32_t{1} << 31;  // flag in `unfinished_`

    alignas(64) std::atomic<uint64_t> ticket_{0};
    std::atomic<void (*)(const void*, int)> body_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int> chunks_{0};
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    alignas(64) std::atomic<int> sleeping_{0};  // number of workers that sleep
    std::atomic<bool> stop_{false};
    Crowd crowd_;
    // Last wait of the caller; on a cache line of its own, because workers read the line above all the time.
    alignas(64) Clock::time_point waited_{Clock::now()};
    std::mutex mutex_;
    std::condition_variable called_, finished_;
    std::vector<std::thread> workers_;
};

thread_local bool in_job = false;  // nested jobs run inline

void Pool::work() {
    in_job = true;
    for (auto waited = Clock::now(); !stop_;)
        if (!take_chunks(waited, [this] { return called(); })) {
            sleep_until_called();
            waited = Clock::now();
        }
}

// Sequentially consistent: either the worker sees the ticket before it sleeps, or run() sees the worker asleep.
void Pool::sleep_until_called() {
    std::unique_lock lock(mutex_);
    ++sleeping_;
    called_.wait(lock, [this] { return stop_ || static_cast<uint32_t>(ticket_.load()); });
    --sleeping_;
}

// Either the last chunk's thread sees the caller asleep, or the caller sees that the last chunk is finished.
void Pool::sleep_until_finished() {
    if (!unfinished_.fetch_or(caller_sleeps, std::memory_order_acq_rel)) return;
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished(); });
}

void Pool::wake(std::condition_variable& sleepers) {
    { std::lock_guard lock(mutex_); }
    sleepers.notify_all();
}

// Never destroyed, because a worker may still spin on it at exit. A forked child has none of the parent's workers, and
// another thread of the parent may have held the lock. So the child makes a pool and a lock of its own.
struct State {
    std::mutex in_use;
    Pool* pool = nullptr;
    std::atomic<int> threads{usable_cpus()};  // also read without the lock
};

State*& state() {
    static State* instance = [] {
        pthread_atfork(nullptr, nullptr, [] {
            in_job = false;
            state() = new State{{}, nullptr, {state()->threads.load()}};
        });
        return new State;
    }();
    return instance;
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
        if (!s.pool) s.pool = new Pool(std::min<int>(s.threads, usable_cpus()));
        in_job = true;
        s.pool->run(chunks, body, context);
        in_job = false;
        return;
    }
    for (int chunk = 0; chunk < chunks; chunk++) body(context, chunk);
}

}  // namespace triforce
