// Local ranks on one GPU for the protocol test: buffers, inputs, launches, and the host's independent reference.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <cuda_runtime.h>
#include <unistd.h>

#include "stand_in_engine.cuh"

inline void check_call(cudaError_t error, const char* file, int line) {
    if (error == cudaSuccess)
        return;
    printf("%s:%d %s\n", file, line, cudaGetErrorString(error));
    fflush(stdout);
    _exit(3);
}
#define CHECK(call) check_call((call), __FILE__, __LINE__)

namespace stand_in {

using Kernel = void (*)(Params);

// One rank's inputs of one call and what must come out.
struct RankCase {
    int num_tokens = 0;
    std::vector<uint8_t> codes, scales;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    std::vector<uint16_t> shared_x;
    std::vector<uint16_t> y;      // expected
    std::vector<uint16_t> shared; // expected, this rank's partial
    std::vector<int> statistics;  // rows received per local expert
    // device copies
    uint8_t *d_codes, *d_scales;
    int64_t* d_ids;
    float* d_weights;
    uint16_t *d_shared_x, *d_y, *d_shared;
};
struct Case {
    int num_shared_tokens = 0;
    std::vector<RankCase> ranks;
};

inline float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? ldexpf(mantissa, -9) : ldexpf(8 + mantissa, exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
}
inline uint32_t bf16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float bf16_to_float(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline uint32_t hash_token(const Config& c, const RankCase& rank, int token) {
    const int hidden = c.shape.hidden;
    uint32_t sum = 0;
    for (int i = 0; i < hidden; ++i) {
        const int scale = rank.scales[size_t(token) * (hidden / 32) + i / 32] - 127;
        sum += bf16_bits(ldexpf(e4m3_value(rank.codes[size_t(token) * hidden + i]), scale + 8)) * factor(i);
    }
    return sum;
}
// What a route contributes: the integers of its partial.
inline void add_route(const Config& c, uint32_t sum, uint32_t expert, float weight, std::vector<float>& sums) {
    uint32_t hash = 0;
    for (int i = 0; i < c.shape.intermediate; ++i)
        hash += bf16_of_int(hidden_value(sum, i, expert, weight)) * factor(i);
    for (int i = 0; i < c.shape.hidden; ++i)
        sums[i] += partial_value(hash, i, expert);
}

inline void expect_rank(const Config& c, const Case& all, int rank_idx, RankCase& rank) {
    rank.y.assign(size_t(c.shape.num_max_tokens) * c.shape.hidden, 0x7FC1);
    for (int token = 0; token < rank.num_tokens; ++token) {
        std::vector<float> sums(c.shape.hidden, 0.f);
        const uint32_t sum = hash_token(c, rank, token);
        for (int i = token * c.shape.num_topk; i < (token + 1) * c.shape.num_topk; ++i)
            if (rank.ids[i] >= 0)
                add_route(c, sum, rank.ids[i], rank.weights[i], sums);
        for (int i = 0; i < c.shape.hidden; ++i)
            rank.y[size_t(token) * c.shape.hidden + i] = bf16_bits(sums[i]);
    }
    rank.statistics.assign(c.shape.num_local_experts(), 0);
    for (const RankCase& source : all.ranks)
        for (int i = 0; i < source.num_tokens * c.shape.num_topk; ++i)
            if (source.ids[i] >= 0 && source.ids[i] / c.shape.num_local_experts() == rank_idx)
                ++rank.statistics[source.ids[i] % c.shape.num_local_experts()];
    if (!c.has_shared())
        return;
    rank.shared.assign(size_t(all.num_shared_tokens) * c.shared_hidden, 0);
    for (int token = 0; token < all.num_shared_tokens; ++token) {
        uint32_t sum = 0, hash = 0;
        for (int i = 0; i < c.shared_hidden; ++i)
            sum += rank.shared_x[size_t(token) * c.shared_hidden + i] * factor(i);
        for (int i = 0; i < c.shape.shared_intermediate; ++i)
            hash += bf16_of_int(hidden_value(sum, i, 1, 0)) * factor(i);
        for (int i = 0; i < c.shared_hidden; ++i)
            rank.shared[size_t(token) * c.shared_hidden + i] = bf16_of_int(partial_value(hash, i, rank_idx));
    }
}

template <class T>
T* upload(const std::vector<T>& host) {
    T* device;
    CHECK(cudaMalloc(&device, host.size() * sizeof(T) + 16));
    CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

enum class Routing { kUniform, kHolesAndDuplicates, kOneExpert, kOneRank, kEmptyRanks, kAllEmpty };

inline void make_rank(const Config& c, Routing routing, int num_tokens, int hot, std::mt19937& rng, RankCase& rank) {
    const int topk = c.shape.num_topk, hidden = c.shape.hidden;
    rank.num_tokens = num_tokens;
    rank.codes.resize(size_t(num_tokens) * hidden);
    for (uint8_t& code : rank.codes)
        do
            code = rng();
        while ((code & 0x7F) == 0x7F);
    rank.scales.resize(size_t(num_tokens) * (hidden / 32));
    for (uint8_t& scale : rank.scales)
        scale = 100 + rng() % 40;
    rank.ids.assign(num_tokens * topk, -1);
    rank.weights.assign(num_tokens * topk, 1.f);
    for (int i = 0; i < num_tokens * topk; ++i) {
        int64_t id = rng() % c.shape.num_experts;
        if (routing == Routing::kHolesAndDuplicates && rng() % 4 == 0)
            id = rng() % 2 || i == 0 ? -1 : rank.ids[i - 1];
        if (routing == Routing::kOneExpert)
            id = hot;
        if (routing == Routing::kOneRank)
            id = hot / c.shape.num_local_experts() * c.shape.num_local_experts() + rng() % c.shape.num_local_experts();
        rank.ids[i] = id;
        rank.weights[i] = rng() % 60;
    }
}

inline Case make_case(const Config& c, Routing routing, int max_tokens, std::mt19937& rng) {
    Case result;
    const int hot = rng() % c.shape.num_experts;
    result.num_shared_tokens = c.has_shared() ? rng() % 5 * c.shape.num_ranks : 0;
    std::vector<uint16_t> x(size_t(result.num_shared_tokens) * c.shared_hidden);
    for (uint16_t& value : x)
        value = rng();
    result.ranks.resize(c.shape.num_ranks);
    for (RankCase& rank : result.ranks) {
        int num_tokens = routing == Routing::kUniform ? max_tokens : rng() % (max_tokens + 1);
        if (routing == Routing::kAllEmpty || (routing == Routing::kEmptyRanks && rng() % 2))
            num_tokens = 0;
        make_rank(c, routing, num_tokens, hot, rng, rank);
        rank.shared_x = x;
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < c.shape.num_ranks; ++i)
        threads.emplace_back([&, i] { expect_rank(c, result, i, result.ranks[i]); });
    for (std::thread& thread : threads)
        thread.join();
    for (RankCase& rank : result.ranks) {
        rank.d_codes = upload(rank.codes), rank.d_scales = upload(rank.scales), rank.d_ids = upload(rank.ids);
        rank.d_weights = upload(rank.weights), rank.d_shared_x = upload(rank.shared_x), rank.d_y = upload(rank.y);
        rank.d_shared = upload(rank.shared);
    }
    return result;
}

// ---- comparison on the device, in stream order
__global__ void compare(const uint16_t* got, const uint16_t* wanted, size_t count, uint32_t* num_bad, uint32_t what) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        if (got[i] != wanted[i])
            atomicAdd(num_bad + what, 1);
}
__global__ void set_flags(int32_t* flags, int generation, int stride) {
    flags[0] = generation, flags[2] = stride;
}
__global__ void fill(uint16_t* y, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        y[i] = 0x7FC1;
}
// Fragments that source ranks published into one rank's workspace generation.
__global__ void compare_published(const uint16_t* workspace, const uint16_t* wanted, int source, int rank,
    int num_ranks, int num_tokens, int hidden, bool token_owner, uint32_t* num_bad) {
    const int shard = token_owner ? hidden : hidden / num_ranks,
              tokens = token_owner ? num_tokens / num_ranks : num_tokens;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tokens * shard; i += gridDim.x * blockDim.x) {
        const int token = i / shard, column = i % shard;
        const size_t at = token_owner ? (size_t(token) * num_ranks + source) * hidden + column
                                      : size_t(token) * hidden + source * shard + column;
        const size_t from = token_owner ? size_t(rank * tokens + token) * hidden + column
                                        : size_t(token) * hidden + rank * shard + column;
        if (workspace[at] != wanted[from])
            atomicAdd(num_bad + 1, 1);
    }
}

// Constants of the run: grid per rank, buffers, streams.
struct World {
    Config config;
    Kernel kernel;
    int num_ctas;
    std::vector<uint8_t*> buffers, workspaces;
    std::vector<uint16_t*> y, shared_y;
    std::vector<int32_t*> statistics, flags;
    std::vector<int64_t*> peers;
    std::vector<uint32_t*> num_bad;
    std::vector<cudaStream_t> streams;
    plan::AbortCell* records;
    std::vector<uint64_t*> timelines;
    std::vector<std::vector<int>> wanted_statistics;
    static constexpr int kGenerations = 3;
    uint64_t stride() const { return uint64_t(64) * config.shared_hidden * 2 * config.shape.num_ranks; }

    World(const Config& c, Kernel k, int ctas) : config(c), kernel(k), num_ctas(ctas) {
        const int n = c.shape.num_ranks;
        CHECK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, plan::shared_memory_bytes(c)));
        CHECK(cudaMallocHost(&records, n * sizeof(plan::AbortCell)));
        memset(records, 0, n * sizeof(plan::AbortCell));
        const auto allocate = [](auto& list, size_t bytes) {
            void* p;
            CHECK(cudaMalloc(&p, bytes));
            CHECK(cudaMemset(p, 0, bytes));
            list.push_back(static_cast<std::remove_reference_t<decltype(list[0])>>(p));
        };
        for (int i = 0; i < n; ++i) {
            allocate(buffers, plan::total_bytes(c.shape));
            allocate(workspaces, kGenerations * stride() + 16);
            allocate(y, size_t(c.shape.num_max_tokens) * c.shape.hidden * 2);
            allocate(shared_y, stride() + 16);
            allocate(statistics, c.shape.num_local_experts() * 4);
            allocate(timelines, 512 * debug::kTimelineWarps * debug::kTimelineRecords * sizeof(debug::TimelineRecord)),
                allocate(flags, 64), allocate(peers, 512), allocate(num_bad, 64);
            cudaStream_t s;
            CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
            streams.push_back(s);
        }
        wanted_statistics.assign(n, std::vector<int>(c.shape.num_local_experts(), 0));
        for (int i = 0; i < n; ++i)
            CHECK(cudaMemcpy(peers[i], workspaces.data(), n * 8, cudaMemcpyHostToDevice));
    }

    void reset() {
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < config.shape.num_ranks; ++i) {
            CHECK(cudaMemset(buffers[i], 0, plan::total_bytes(config.shape)));
            CHECK(cudaMemset(num_bad[i], 0, 64));
            CHECK(cudaMemset(statistics[i], 0, config.shape.num_local_experts() * 4));
        }
        memset(records, 0, config.shape.num_ranks * sizeof(plan::AbortCell));
        for (auto& list : wanted_statistics)
            list.assign(list.size(), 0);
        CHECK(cudaDeviceSynchronize());
    }

    Params params(const Case& all, int rank, uint32_t delay_ns, uint64_t timeout_ns) const {
        Params p{};
        for (int i = 0; i < config.shape.num_ranks; ++i)
            p.buffers[i] = buffers[i];
        p.rank = rank, p.num_tokens = all.ranks[rank].num_tokens, p.y = y[rank], p.statistics = statistics[rank];
        p.shared = {all.ranks[rank].d_shared_x, nullptr, nullptr, shared_y[rank], all.num_shared_tokens};
        p.publication = {flags[rank], peers[rank], stride(), kGenerations};
        p.scalars.rms_epsilon = 1e-5f, p.scalars.timeout_ns = timeout_ns, p.scalars.debug_delay_ns = delay_ns;
        p.error_record = records + rank, p.timeline = timelines[rank];
        return p;
    }

    void put_inputs(const RankCase& in, int rank, int generation) const {
        const auto view = [&](plan::Component which) {
            return buffers[rank] + plan::component_offset(config.shape, which);
        };
        const size_t tokens = in.num_tokens, routes = tokens * config.shape.num_topk;
        const auto copy = [&](void* to, const void* from, size_t bytes) {
            if (bytes)
                CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, streams[rank]));
        };
        copy(view(plan::Component::kInputX), in.d_codes, tokens * config.shape.hidden);
        copy(view(plan::Component::kInputScales), in.d_scales, tokens * (config.shape.hidden / 32));
        copy(view(plan::Component::kInputTopkIdx), in.d_ids, routes * 8);
        copy(view(plan::Component::kInputTopkWeights), in.d_weights, routes * 4);
        set_flags<<<1, 1, 0, streams[rank]>>>(flags[rank], generation, static_cast<int32_t>(stride()));
    }

    void launch(const Params& p) const {
        kernel<<<num_ctas, config.num_threads, plan::shared_memory_bytes(config), streams[p.rank]>>>(p);
        CHECK(cudaGetLastError());
    }

    // Compares all that one rank may look at once its call has ended.
    void check(const Case& all, int rank, int generation) const {
        const RankCase& in = all.ranks[rank];
        const size_t elements = size_t(config.shape.num_max_tokens) * config.shape.hidden;
        compare<<<32, 256, 0, streams[rank]>>>(y[rank], in.d_y, elements, num_bad[rank], 0);
        fill<<<32, 256, 0, streams[rank]>>>(y[rank], elements);
        if (config.is_published())
            for (int source = 0; source < config.shape.num_ranks; ++source)
                compare_published<<<4, 256, 0, streams[rank]>>>(
                    reinterpret_cast<uint16_t*>(workspaces[rank] + generation * stride()), all.ranks[source].d_shared,
                    source, rank, config.shape.num_ranks, all.num_shared_tokens, config.shared_hidden,
                    config.shared_output == SharedOutput::kTokenOwner, num_bad[rank]);
        else if (config.has_shared())
            compare<<<4, 256, 0, streams[rank]>>>(shared_y[rank], in.d_shared, in.shared.size(), num_bad[rank], 1);
    }
};

} // namespace stand_in
