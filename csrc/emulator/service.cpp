// The emulator as a target of the launch layer: kernels of all ranks of the process run on one machine, side by side.
// A thread that launches waits until its kernel has ended; one of the waiting threads turns the machine.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "device.hpp"
#include "jit/module.hpp"
#include "races.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace deep_gemm_k3::emulator {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGather = std::chrono::milliseconds(20);
constexpr u32 kRestsBetweenLooks = 32;
// A kernel whose waits have a limit has long given up after so many of them; one that still polls never will.
constexpr int kLimits = 4;
constexpr auto kSlack = std::chrono::seconds(2);

struct Kernel {
    std::unique_ptr<Module> module;
    std::shared_ptr<ModuleInstance> instance;
    std::string entry;
};

struct Job {
    std::unique_ptr<Launch> pending; // until the machine has it
    u64 world = 0;
    u32 num_ranks = 0; // of the world, when all of them launch from this process
    Launch* launch = nullptr;
    bool done = false;
    std::string error;
    Clock::time_point since = Clock::now();       // when it came
    Clock::duration limit{};                      // of its own waits; zero: it names none
    u64 effects = 0;                              // of its warps when it was last looked at
    Clock::time_point last_effect = Clock::now(); // when that was seen to change
};

class Service {
  public:
    s64 load(const jit::KernelSpec& spec) {
        std::string text(static_cast<const char*>(spec.image), spec.image_bytes);
        text.resize(std::min(text.size(), text.find('\0')));
        auto kernel = std::make_unique<Kernel>();
        kernel->module = std::make_unique<Module>(text);
        kernel->module->program(spec.entry);
        kernel->instance = kernel->module->instantiate();
        kernel->entry = spec.entry;
        const std::lock_guard lock(mutex_);
        kernels_.push_back(std::move(kernel));
        return static_cast<s64>(kernels_.size());
    }

    void launch(s64 handle, const jit::LaunchRequest& request) {
        Job job;
        job.world = request.world, job.num_ranks = request.num_ranks_here;
        job.limit = std::chrono::nanoseconds(request.timeout_ns);
        std::unique_lock lock(mutex_);
        Kernel& kernel = *kernels_.at(static_cast<size_t>(handle - 1));
        job.pending = make(kernel, request);
        if (is_recording_)
            recorded_.push_back(record_text(handle, kernel.entry, request));
        waiting_.push_back(&job);
        has_news_ = true;
        news_.notify_all();
        while (!job.done) {
            if (is_turning_) {
                news_.wait(lock);
                continue;
            }
            is_turning_ = true;
            turn(job, lock);
            is_turning_ = false;
            news_.notify_all();
        }
        if (!job.error.empty())
            throw std::runtime_error("emulator: " + job.error);
    }

    void configure(const Options& options, u64 patience_ns) {
        const std::lock_guard lock(mutex_);
        chosen_ = std::make_unique<Options>(options);
        patience_ = std::chrono::nanoseconds(patience_ns);
    }

    std::string report() {
        const std::lock_guard lock(mutex_);
        return report_json(machine_);
    }

    // The machine takes over what is told here when the next launch starts.
    void observe(const std::string& roles, bool is_tracing) {
        tell([=](Observer& o) {
            o.is_tracing = is_tracing;
            if (!roles.empty())
                o.set_roles(roles);
        });
    }
    void own(u64 low, u64 bytes, u32 rank) {
        tell([=](Observer& o) { bytes ? o.own(low, bytes, rank) : o.disown(low); });
    }
    std::string trace() {
        const std::lock_guard lock(mutex_);
        if (is_turning_)
            throw std::runtime_error("trace: wanted no call that runs");
        return machine_.observer.trace_json();
    }

    void record(bool on) {
        const std::lock_guard lock(mutex_);
        is_recording_ = on;
        recorded_.clear();
    }

    std::string recorded() {
        const std::lock_guard lock(mutex_);
        std::string out = "[";
        for (const std::string& one : recorded_)
            out += (out.size() > 1 ? "," : "") + one;
        return out + "]";
    }

    void clear() {
        const std::lock_guard lock(mutex_);
        machine_.findings.clear(), machine_.finding_keys.clear();
        machine_.counters = Counters{};
        machine_.observer.clear();
        machine_.printed.clear();
    }

  private:
    std::mutex mutex_;
    std::condition_variable news_;
    bool is_turning_ = false;
    std::atomic<bool> has_news_{false};
    std::vector<std::unique_ptr<Kernel>> kernels_;
    std::vector<Job*> waiting_, running_;
    bool is_recording_ = false;
    std::vector<std::string> recorded_;
    Machine machine_{Options{}};
    u32 rounds_ = 0; // without progress while nobody outside could help
    u32 rests_ = 0;
    Clock::duration patience_{}; // zero: by the limits of the jobs
    std::vector<std::function<void(Observer&)>> told_;
    std::unique_ptr<Options> chosen_; // taken over when nothing runs

    std::unique_ptr<Launch> make(Kernel& kernel, const jit::LaunchRequest& request) {
        LaunchArguments a;
        a.module = kernel.module.get(), a.instance = kernel.instance, a.kernel = kernel.entry;
        const jit::Dim3 shapes[] = {request.grid, request.block, request.cluster};
        u32* to[] = {a.grid, a.block, a.cluster};
        for (int i = 0; i < 3; ++i)
            to[i][0] = shapes[i].x, to[i][1] = shapes[i].y, to[i][2] = shapes[i].z;
        a.dynamic_shared = request.shared_bytes;
        a.params = static_cast<const u8*>(request.params), a.param_bytes = request.params_bytes;
        a.rank = request.rank;
        auto launch = prepare(a);
        // persistent kernels wait for each other: every CTA is resident, as the launch layer has made sure
        launch->resident_limit = a.grid[0] * a.grid[1] * a.grid[2];
        return launch;
    }

    // Runs the machine until the job is done. The lock is held on entry and exit, and free while warps run.
    void turn(Job& mine, std::unique_lock<std::mutex>& lock) {
        machine_.memory.accept_mapped = true;
        while (!mine.done) {
            for (auto left = time_to_gather(); left.count() > 0; left = time_to_gather()) {
                has_news_ = false;
                news_.wait_for(lock, left, [&] { return has_news_.load(); });
            }
            start_waiting();
            lock.unlock();
            std::string error;
            bool is_quiet = false;
            try {
                is_quiet = !stretch();
            } catch (const Fault& fault) {
                error = fault.kind + ": " + fault.what();
            } catch (const std::exception& fault) {
                error = fault.what();
            }
            lock.lock();
            if (!error.empty())
                return fail(error);
            finish_done();
            if (is_quiet && !mine.done && !has_news_) {
                if (!is_closed()) {
                    const std::string stuck = rests_++ % kRestsBetweenLooks ? "" : stuck_text();
                    stuck.empty() ? rest(lock) : fail("deadlock: " + stuck);
                } else if (!machine_.quiet_round(rounds_))
                    fail("deadlock: " + machine_.deadlock_text());
            }
        }
    }

    void tell(std::function<void(Observer&)> what) {
        const std::lock_guard lock(mutex_);
        told_.push_back(std::move(what));
    }

    // How long to wait for the other ranks of those that want to start, so that they start together whatever the host's
    // threads do and a seed gives the same run; a rank that is late is not waited for.
    Clock::duration time_to_gather() const {
        Clock::duration left{};
        for (const Job* job : waiting_) {
            const auto is_member = [&](const Job* other) { return other->world == job->world; };
            if (running_.empty() && std::count_if(waiting_.begin(), waiting_.end(), is_member) < job->num_ranks)
                left = std::max(left, job->since + kGather - Clock::now());
        }
        return left;
    }

    void start_waiting() {
        std::stable_sort(waiting_.begin(), waiting_.end(),
            [](const Job* a, const Job* b) { return a->pending->rank < b->pending->rank; });
        has_news_ = false;
        for (auto& what : told_)
            what(machine_.observer);
        told_.clear();
        if (running_.empty() && !waiting_.empty()) {
            if (chosen_) {
                machine_.options = *chosen_;
                machine_.random.seed(chosen_->seed);
                machine_.schedule = 0;
                chosen_ = nullptr;
            }
            machine_.races = machine_.options.races ? std::make_shared<Races>(machine_) : nullptr;
            machine_.next_warp_id = 0;
            machine_.memory.forget_mapped();
        }
        for (Job* job : waiting_) {
            job->launch = job->pending.get();
            machine_.memory.add(
                job->launch->instance->base, job->launch->instance->storage.size() * 8 - 256, "module variables");
            machine_.memory.add(
                job->launch->param_base, job->launch->program->param_bytes + 1, "kernel parameters", false);
            machine_.launches.push_back(std::move(job->pending));
            machine_.admit(*job->launch);
            running_.push_back(job);
        }
        waiting_.clear();
    }

    // false when nobody is ready
    bool stretch() {
        for (int i = 0; i < 2000; ++i) {
            if (!machine_.step())
                return false;
            if (has_news_)
                return true;
        }
        return true;
    }

    void finish_done() {
        for (size_t i = 0; i < running_.size();) {
            Job* job = running_[i];
            if (!machine_.is_finished(*job->launch)) {
                ++i;
                continue;
            }
            machine_.memory.forget(job->launch->param_base);
            machine_.remove(job->launch);
            running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
            job->done = true;
            news_.notify_all();
        }
    }

    // Whether every rank of every group is in a call, so that nobody outside can end a wait.
    bool is_closed() const {
        return std::all_of(running_.begin(), running_.end(), [&](const Job* job) {
            auto is_member = [&](const Job* other) { return other->world == job->world; };
            return job->num_ranks && std::count_if(running_.begin(), running_.end(), is_member) == job->num_ranks;
        });
    }

    // Why waiting longer is of no use although somebody outside could still write to memory; empty when it may be.
    std::string stuck_text() {
        if (Cluster* cluster = machine_.dead_end())
            return machine_.release_meetings_softly(cluster) ? "" : machine_.deadlock_text(cluster);
        const auto now = Clock::now();
        for (Job* job : running_) {
            const u64 effects = job->launch->count_effects();
            if (effects != job->effects)
                job->effects = effects, job->last_effect = now;
            const auto limit = patience_.count() ? patience_ : job->limit * kLimits + kSlack;
            if (now - job->last_effect < limit || (!patience_.count() && !job->limit.count()))
                continue;
            job->last_effect = now;
            if (!machine_.release_meetings_softly())
                return machine_.deadlock_text();
        }
        return "";
    }

    // Others may still be on their way to launch, or write from another process: yield the core, let time pass as it
    // does outside, and let everybody who polls look again. The kernels' own limits end a wait that nobody answers.
    void rest(std::unique_lock<std::mutex>& lock) {
        auto start = Clock::now();
        news_.wait_for(lock, std::chrono::microseconds(200), [&] { return has_news_.load(); });
        auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
        machine_.virtual_ns += static_cast<u64>(passed);
        machine_.unpark_all(true);
    }

    void fail(const std::string& error) {
        for (Job* job : running_)
            machine_.memory.forget(job->launch->param_base);
        for (auto* list : {&running_, &waiting_}) {
            for (Job* job : *list)
                job->error = error, job->done = true;
            list->clear();
        }
        rounds_ = 0;
        machine_.reset();
    }
};

Service& service() {
    static auto* the_one = new Service; // outlives every thread that may still launch
    return *the_one;
}

int64_t load_kernel(const jit::KernelSpec& spec) {
    return service().load(spec);
}
void launch_kernel(int64_t kernel, const jit::LaunchRequest& request) {
    service().launch(kernel, request);
}

const bool announced = [] {
    jit::set_emulator({load_kernel, launch_kernel});
    return true;
}();

thread_local std::string answer;

} // namespace

} // namespace deep_gemm_k3::emulator

EXPORT void emulator_service_configure(
    uint64_t seed, int adversary, int races, uint32_t quantum, uint64_t patience_ns) {
    deep_gemm_k3::emulator::Options options;
    options.seed = seed;
    options.adversary = static_cast<deep_gemm_k3::emulator::Adversary>(adversary);
    options.races = races != 0;
    options.quantum = quantum ? quantum : options.quantum;
    deep_gemm_k3::emulator::service().configure(options, patience_ns);
}

EXPORT const char* emulator_service_report() {
    deep_gemm_k3::emulator::answer = deep_gemm_k3::emulator::service().report();
    return deep_gemm_k3::emulator::answer.c_str();
}

// Starts (and forgets what was there), or stops, keeping what every launch was given.
EXPORT void emulator_service_record(int on) {
    deep_gemm_k3::emulator::service().record(on != 0);
}

EXPORT const char* emulator_service_recorded() {
    deep_gemm_k3::emulator::answer = deep_gemm_k3::emulator::service().recorded();
    return deep_gemm_k3::emulator::answer.c_str();
}

// Roles of warps ("": as they are), and whether to keep a trace.
EXPORT int emulator_service_observe(const char* roles, int trace) {
    try {
        deep_gemm_k3::emulator::Observer().set_roles(roles);
    } catch (const std::exception&) {
        return 0;
    }
    deep_gemm_k3::emulator::service().observe(roles, trace != 0);
    return 1;
}

// Memory of a rank; no bytes: of nobody any more.
EXPORT void emulator_service_own(uint64_t low, uint64_t bytes, uint32_t rank) {
    deep_gemm_k3::emulator::service().own(low, bytes, rank);
}

EXPORT const char* emulator_service_trace() {
    deep_gemm_k3::emulator::answer = deep_gemm_k3::emulator::service().trace();
    return deep_gemm_k3::emulator::answer.c_str();
}

EXPORT void emulator_service_clear() {
    deep_gemm_k3::emulator::service().clear();
}
