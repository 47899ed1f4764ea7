// Protocol test on one GPU: the real roles around stand-in tiles, several local ranks, exact integer checks.
//   protocol_test [correct|single|abort|time|all] [calls]    single: one rank only, for tools that serialise kernels
// Run it with CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER: ranks must neither share a queue nor load
// lazily. Prints one line per experiment; the last line is PASSED or FAILED.
#include <string>

#include "world.cuh"

using namespace deep_gemm_k3;
using namespace stand_in;

namespace {

constexpr Config make_config(
    BufferShape shape, int num_tokens, SharedOutput output, SplitCounts splits = {1, 1, 1, 1}) {
    const bool shared = output != SharedOutput::kNone;
    return {.arch = Architecture::kSM90,
        .shape = shape,
        .shared_hidden = shared ? 2048 : 0,
        .activation = Activation::kSiTU,
        .shared_output = output,
        .has_clamp = false,
        .fast_math = true,
        .has_rms_norm = false,
        .has_statistics = true,
        .routed_tile = {256, num_tokens, 128},
        .shared_tile = {128, 16, 64},
        .splits = splits,
        .num_stages = 1,
        .num_math_warpgroups = 2,
        .num_threads = 384,
        .num_ctas_per_sm = 1};
}

// ranks, experts, top-k, max tokens, max shared tokens, hidden, intermediate, shared intermediate
constexpr Config kOne = make_config({1, 4, 2, 384, 384, 1024, 512, 256}, 8, SharedOutput::kNone);
constexpr Config kTwo = make_config({2, 8, 4, 384, 384, 1152, 384, 256}, 16, SharedOutput::kDense);
constexpr Config kFour = make_config({4, 12, 3, 384, 384, 1024, 512, 256}, 16, SharedOutput::kHiddenSharded);
constexpr Config kEight =
    make_config({8, 64, 16, 384, 384, 1024, 256, 128}, 8, SharedOutput::kTokenOwner, {2, 2, 2, 2});
constexpr Config kWide = make_config({8, 896, 16, 384, 384, 3584, 3072, 256}, 16, SharedOutput::kNone);
constexpr Config kLocal = make_config({1, 896, 32, 384, 384, 1024, 256, 128}, 32, SharedOutput::kDense);
constexpr Config kCrowd = make_config({8, 16, 32, 384, 384, 256, 128, 128}, 64, SharedOutput::kNone);
constexpr Config kSmall1 = make_config({1, 1, 1, 384, 384, 3584, 3072, 128}, 8, SharedOutput::kNone);
constexpr Config kSmall8 = make_config({8, 8, 1, 384, 384, 3584, 3072, 128}, 64, SharedOutput::kNone);

#define DEFINE_KERNEL(name, config)                                                                                    \
    __global__ void __launch_bounds__(config.num_threads, config.num_ctas_per_sm)                                      \
        name(const __grid_constant__ Params params) {                                                                  \
        extern __shared__ __align__(1024) uint8_t shared[];                                                            \
        kernels::run<config, Engine<config>>(params, shared);                                                          \
    }
DEFINE_KERNEL(run_one, kOne)
DEFINE_KERNEL(run_two, kTwo)
DEFINE_KERNEL(run_four, kFour)
DEFINE_KERNEL(run_eight, kEight)
DEFINE_KERNEL(run_wide, kWide)
DEFINE_KERNEL(run_local, kLocal)
DEFINE_KERNEL(run_crowd, kCrowd)
DEFINE_KERNEL(run_small1, kSmall1)
DEFINE_KERNEL(run_small8, kSmall8)

constexpr uint64_t kTimeout = 3000000000ull;
bool all_passed = true;

void report(bool passed, const std::string& what) {
    all_passed &= passed;
    printf("%s %s\n", passed ? "ok  " : "FAIL", what.c_str());
}

// Counts bad values and aborts of all ranks since the last reset.
bool is_clean(World& world, const char* name) {
    CHECK(cudaDeviceSynchronize());
    bool clean = true;
    for (int rank = 0; rank < world.config.shape.num_ranks; ++rank) {
        uint32_t bad[2];
        CHECK(cudaMemcpy(bad, world.num_bad[rank], 8, cudaMemcpyDeviceToHost));
        std::vector<int> statistics(world.config.shape.num_local_experts());
        CHECK(cudaMemcpy(statistics.data(), world.statistics[rank], statistics.size() * 4, cudaMemcpyDeviceToHost));
        const plan::AbortCell& record = world.records[rank];
        if (bad[0] == 0 && bad[1] == 0 && record.code == 0 && statistics == world.wanted_statistics[rank])
            continue;
        clean = false;
        printf("  %s rank %d: y %u shared %u statistics %d abort %u by %u where %x index %u wanted %u seen %u\n", name,
            rank, bad[0], bad[1], statistics == world.wanted_statistics[rank], record.code, record.rank, record.where,
            record.index, record.wanted, record.seen);
    }
    return clean;
}

void run_calls(const char* name, World& world, int max_tokens, int num_calls, int num_cases, bool skew) {
    std::mt19937 rng(max_tokens * 31 + num_calls);
    std::vector<Case> cases;
    constexpr Routing kinds[] = {Routing::kUniform, Routing::kHolesAndDuplicates, Routing::kOneExpert,
        Routing::kOneRank, Routing::kEmptyRanks, Routing::kAllEmpty};
    for (int i = 0; i < num_cases; ++i)
        cases.push_back(make_case(world.config, kinds[i % 6], max_tokens, rng));
    world.reset();
    for (int rank = 0; rank < world.config.shape.num_ranks; ++rank)
        fill<<<32, 256, 0, world.streams[rank]>>>(
            world.y[rank], size_t(world.config.shape.num_max_tokens) * world.config.shape.hidden);
    bool clean = true;
    for (int call = 0; call < num_calls && clean; ++call) {
        const Case& all = cases[rng() % cases.size()];
        const int generation = call % World::kGenerations;
        for (int rank = 0; rank < world.config.shape.num_ranks; ++rank) {
            world.put_inputs(all.ranks[rank], rank, generation);
            const uint32_t delay = !skew ? 0 : (rng() % 8 == 0 ? rng() % 300000 : (rng() % 2 ? rng() % 5000 : 0));
            world.launch(world.params(all, rank, delay, kTimeout));
            world.check(all, rank, generation);
            for (size_t i = 0; i < all.ranks[rank].statistics.size(); ++i)
                world.wanted_statistics[rank][i] += all.ranks[rank].statistics[i];
        }
        if (call % 64 == 63)
            clean = is_clean(world, name);
    }
    clean = clean && is_clean(world, name);
    report(clean, std::string(name) + ": " + std::to_string(num_calls) + " calls, up to " + std::to_string(max_tokens) +
                      " tokens per rank, " + std::to_string(world.num_ctas) + " CTAs per rank" +
                      (skew ? ", skewed" : ""));
}

void run_single(int calls) {
    {
        World world(kOne, run_one, 132);
        run_calls("1 rank, 4 experts, top-2", world, 65, calls, 12, true);
        run_calls("1 rank, plain counts", world, 384, calls / 4, 6, false);
    }
    {
        World world(kLocal, run_local, 132);
        run_calls("1 rank, 896 local experts, top-32", world, 48, calls / 4, 6, false);
        run_calls("1 rank, 896 local, two-level", world, 300, calls / 8, 3, false);
    }
}

void run_correctness(int calls) {
    run_single(calls);
    {
        World world(kTwo, run_two, 66);
        run_calls("2 ranks, dense shared, hidden 1152", world, 64, calls, 12, true);
        run_calls("2 ranks, plain rows", world, 384, calls / 4, 6, true);
    }
    {
        World world(kFour, run_four, 33);
        run_calls("4 ranks, hidden-sharded", world, 100, calls, 12, true);
        run_calls("4 ranks, plain rows", world, 300, calls / 4, 6, true);
    }
    {
        World world(kEight, run_eight, 16);
        run_calls("8 ranks, token owner, splits", world, 64, calls, 12, true);
        run_calls("8 ranks, two-level counts, pool order", world, 200, calls / 4, 6, true);
    }
    {
        World world(kWide, run_wide, 16);
        run_calls("8 ranks, 896 experts, top-16, 3584/3072", world, 32, calls / 16, 6, true);
        run_calls("8 ranks, wide, pool order", world, 128, calls / 32, 2, true);
    }
    {
        World world(kCrowd, run_crowd, 1);
        run_calls("8 ranks of one CTA, 32-bit counts", world, 384, calls / 32, 1, false);
    }
}

// ---- faults: every one must end the kernels of all ranks and be named on each of them
using Break = void (*)(World&, Case&, std::vector<Params>&);
void expect_abort(World& world, const char* name, sync::Fault fault, sync::What what, int absent_rank, Break break_it) {
    std::mt19937 rng(5);
    Case all = make_case(world.config, Routing::kUniform, 16, rng);
    world.reset();
    const int num_ranks = world.config.shape.num_ranks;
    std::vector<Params> params;
    for (int rank = 0; rank < num_ranks; ++rank) {
        world.put_inputs(all.ranks[rank], rank, 1);
        params.push_back(world.params(all, rank, 0, 20000000));
    }
    break_it(world, all, params);
    CHECK(cudaDeviceSynchronize());
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    bool passed = true;
    for (int round = 0; round < 2; ++round) { // the second call finds the cells set and returns at once
        CHECK(cudaEventRecord(begin, world.streams[0]));
        for (int rank = 0; rank < num_ranks; ++rank)
            if (rank != absent_rank)
                world.launch(params[rank]);
        CHECK(cudaEventRecord(end, world.streams[0]));
        CHECK(cudaDeviceSynchronize());
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        passed &= ms < (round == 0 ? 200 : 5);
        for (int rank = 0; rank < num_ranks; ++rank) {
            plan::AbortCell cell;
            CHECK(cudaMemcpy(&cell, world.buffers[rank] + plan::control::kAbort, sizeof cell, cudaMemcpyDeviceToHost));
            const plan::AbortCell& seen = rank == absent_rank ? cell : world.records[rank];
            passed &=
                seen.code == 1 + static_cast<uint32_t>(fault) && (seen.where & 0xFFFF) == static_cast<uint32_t>(what);
            if (rank == 0)
                printf("  %s: %.2f ms, code %u by rank %u: %s, %s of %s %u, wanted %u, seen %u\n", name, ms, seen.code,
                    seen.rank, sync::kFaultNames[seen.code ? seen.code - 1 : 0], sync::kRoleNames[seen.where >> 16],
                    sync::kWhatNames[seen.where & 0xFFFF], seen.index, seen.wanted, seen.seen);
        }
    }
    report(passed, name);
    world.reset();
}

void run_aborts() {
    World world(kFour, run_four, 33);
    using sync::Fault;
    using sync::What;
    expect_abort(world, "missing rank", Fault::kTimeout, What::kHeader, 3, [](World&, Case&, std::vector<Params>&) {});
    expect_abort(world, "expert id too large", Fault::kExpertOutOfRange, What::kInput, -1,
        [](World& w, Case&, std::vector<Params>&) {
            const int64_t id = w.config.shape.num_experts;
            CHECK(cudaMemcpy(w.buffers[2] + plan::component_offset(w.config.shape, plan::Component::kInputTopkIdx) + 40,
                &id, 8, cudaMemcpyHostToDevice));
        });
    expect_abort(
        world, "expert id -2", Fault::kExpertOutOfRange, What::kInput, -1, [](World& w, Case&, std::vector<Params>&) {
            const int64_t id = -2;
            CHECK(cudaMemcpy(w.buffers[0] + plan::component_offset(w.config.shape, plan::Component::kInputTopkIdx), &id,
                8, cudaMemcpyHostToDevice));
        });
    expect_abort(world, "generation out of range", Fault::kGenerationOutOfRange, What::kInput, -1,
        [](World& w, Case&, std::vector<Params>&) {
            const int32_t generation = World::kGenerations;
            CHECK(cudaMemcpy(w.flags[1], &generation, 4, cudaMemcpyHostToDevice));
        });
    expect_abort(
        world, "stride mismatch", Fault::kStrideMismatch, What::kInput, -1, [](World& w, Case&, std::vector<Params>&) {
            const int32_t stride = 16;
            CHECK(cudaMemcpy(w.flags[1] + 2, &stride, 4, cudaMemcpyHostToDevice));
        });
    expect_abort(world, "shared token counts differ", Fault::kSharedTokensDiffer, What::kHeader, -1,
        [](World&, Case&, std::vector<Params>& p) { p[3].shared.num_tokens += 4; });
    run_calls("after the faults and a reset", world, 40, 64, 6, true);
}

// Latest and mean time of every event over the CTAs of rank 0, in its last call. Needs -DDG_TIMELINE.
void print_timeline(const World& world) {
#ifdef DG_TIMELINE
    const size_t num_tracks = size_t(world.num_ctas) * debug::kTimelineWarps;
    std::vector<debug::TimelineRecord> records(num_tracks * debug::kTimelineRecords);
    CHECK(cudaMemcpy(
        records.data(), world.timelines[0], records.size() * sizeof(debug::TimelineRecord), cudaMemcpyDeviceToHost));
    std::vector<std::vector<uint64_t>> times(debug::kNumEvents);
    uint64_t start = ~0ull;
    for (size_t track = 0; track < num_tracks; ++track) {
        const auto* record = &records[track * debug::kTimelineRecords];
        const uint32_t count = std::min<uint32_t>(record[0].argument, debug::kTimelineRecords - 1);
        for (uint32_t i = 1; i <= count; ++i) {
            times[record[i].event].push_back(record[i].nanoseconds);
            start = std::min(start, record[i].nanoseconds);
        }
    }
    printf("     us, mean/last:");
    for (int event = 0; event < debug::kNumEvents; ++event) {
        double sum = 0, last = 0;
        for (const uint64_t time : times[event]) {
            sum += (time - start) * 1e-3;
            last = std::max(last, (time - start) * 1e-3);
        }
        printf(" %s %.2f/%.2f", debug::kEventNames[event], sum / std::max<size_t>(times[event].size(), 1), last);
    }
    printf("\n");
#endif
}

// ---- time per call: back-to-back launches of all ranks, the checked inputs of run_calls
void time_calls(const char* name, World& world, int num_tokens) {
    std::mt19937 rng(num_tokens);
    Case all = make_case(world.config, Routing::kUniform, num_tokens, rng);
    world.reset();
    const int num_ranks = world.config.shape.num_ranks, num_calls = 64;
    std::vector<cudaEvent_t> begin(num_ranks), end(num_ranks);
    std::vector<cudaGraphExec_t> graphs(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        world.put_inputs(all.ranks[rank], rank, 0);
        fill<<<32, 256, 0, world.streams[rank]>>>(
            world.y[rank], size_t(world.config.shape.num_max_tokens) * world.config.shape.hidden);
        CHECK(cudaEventCreate(&begin[rank]));
        CHECK(cudaEventCreate(&end[rank]));
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(world.streams[rank], cudaStreamCaptureModeRelaxed));
        for (int call = 0; call < num_calls; ++call)
            world.launch(world.params(all, rank, 0, kTimeout));
        CHECK(cudaStreamEndCapture(world.streams[rank], &graph));
        CHECK(cudaGraphInstantiate(&graphs[rank], graph, 0));
        CHECK(cudaGraphUpload(graphs[rank], world.streams[rank]));
    }
    CHECK(cudaDeviceSynchronize());
    double best = 1e30;
    for (int repeat = 0; repeat < 7; ++repeat) {
        for (int rank = 0; rank < num_ranks; ++rank) {
            CHECK(cudaEventRecord(begin[rank], world.streams[rank]));
            CHECK(cudaGraphLaunch(graphs[rank], world.streams[rank]));
            CHECK(cudaEventRecord(end[rank], world.streams[rank]));
        }
        CHECK(cudaDeviceSynchronize());
        for (int rank = 0; rank < num_ranks; ++rank) {
            float ms;
            CHECK(cudaEventElapsedTime(&ms, begin[rank], end[rank]));
            best = std::min(best, ms * 1000.0 / num_calls);
            for (size_t i = 0; i < all.ranks[rank].statistics.size(); ++i)
                world.wanted_statistics[rank][i] += all.ranks[rank].statistics[i] * num_calls;
        }
    }
    for (int rank = 0; rank < num_ranks; ++rank)
        world.check(all, rank, 0);
    report(is_clean(world, name), std::string(name) + ", " + std::to_string(num_tokens) +
                                      " tokens per rank: " + std::to_string(best) + " us per call");
    print_timeline(world);
}

void run_timing() {
    {
        World world(kSmall1, run_small1, 132);
        for (int tokens : {1, 8, 32, 64})
            time_calls("1 rank, 1 expert, top-1, 3584/3072", world, tokens);
    }
    {
        World world(kSmall8, run_small8, 16);
        for (int tokens : {1, 8, 32, 64})
            time_calls("8 ranks, 8 experts, top-1, 3584/3072", world, tokens);
    }
    {
        World world(kWide, run_wide, 16);
        for (int tokens : {8, 64})
            time_calls("8 ranks, 896 experts, top-16, 3584/3072", world, tokens);
    }
}

} // namespace

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::string mode = argc > 1 ? argv[1] : "all";
    if (mode == "correct" || mode == "all")
        run_correctness(argc > 2 ? atoi(argv[2]) : 256);
    if (mode == "single")
        run_single(argc > 2 ? atoi(argv[2]) : 8);
    if (mode == "abort" || mode == "all")
        run_aborts();
    if (mode == "time" || mode == "all")
        run_timing();
    printf("%s\n", all_passed ? "PASSED" : "FAILED");
    return all_passed ? 0 : 1;
}
