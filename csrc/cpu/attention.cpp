// attention.cpp: cuts paged attention into tiles of query rows, spreads them over the threads and joins their partials.
//
// A tile is a few consecutive tokens of one sequence times the query heads of one KV head (all of them, so that keys
// and values are read once for the group). Keys are taken in chunks at absolute positions; each chunk gives a partial
// softmax, and partials are merged in ascending order. Both happen the same way for every tile, whichever thread does
// it, and whether a tile's chunks are done one after the other or (long contexts, few tiles) by several threads.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention_kernel.h"
#include "context.h"
#include "page_layout.h"

namespace pyengine {

namespace cpu {

namespace {

// Below this many multiply-adds a loop is done before another thread has woken up.
constexpr int64_t kInlineWork = 200'000;

// Partials kept at once when the chunks of a tile are shared out, for each thread.
constexpr int64_t kPartialsPerThread = 16;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Query heads of a tile: those of one KV head, in equal parts when there are very many.
int32_t heads_per_tile(const AttentionShape& shape) {
    const int32_t group = shape.num_heads / shape.num_kv_heads;
    const int32_t parts = (group + kMaxTileRows - 1) / kMaxTileRows;
    return (group + parts - 1) / parts;
}

// As many as fill the register blocks of the kernels (12 rows, or 6 or 3), or else the tile.
int32_t tokens_per_tile(int32_t heads) { return 12 % heads == 0 ? 12 / heads : std::max(1, kMaxTileRows / heads); }

struct Tile {
    int32_t seq, kv_head, first_head, num_heads;
    int32_t first_token, num_tokens;  // in the batch
    int32_t first_position;
    int32_t first_chunk, last_chunk;
};

struct Item {
    int32_t tile, chunk;
};

class PagedAttention {
public:
    PagedAttention(ops::Context& context, const Matrix& q, const KvLayer& kv, const AttentionShape& shape,
                   const Batch& batch, const Matrix& out)
        : context_(context),
          q_(q),
          kv_(kv),
          shape_(shape),
          batch_(batch),
          out_(out),
          layout_(kv.dtype, kv.block_size, shape),
          kernels_(select_attention_kernels(context.isa)),
          heads_(heads_per_tile(shape)),
          tokens_(tokens_per_tile(heads_)),
          parts_((shape.num_heads / shape.num_kv_heads + heads_ - 1) / heads_) {
        take_scratch();
    }

    void run() {
        int64_t work = 0, chunks = 0, most_chunks = 0;
        int32_t num_tiles = 0;
        for (int32_t s = 0; s < batch_.num_seqs; ++s) {
            const int64_t length = batch_.query_start[s + 1] - batch_.query_start[s];
            tile_start_[s] = num_tiles;
            num_tiles += static_cast<int32_t>(tiles_across(s) * shape_.num_kv_heads * parts_);
            if (length == 0) continue;
            const int64_t keys = visible_keys(batch_.context_lens[s]);
            const int64_t longest = keys / kKeyChunk + 1;
            work += 2 * length * keys * shape_.num_heads * shape_.head_dim;
            chunks += tiles_across(s) * shape_.num_kv_heads * parts_ * longest;
            most_chunks = std::max(most_chunks, longest);
        }
        tile_start_[batch_.num_seqs] = num_tiles;
        const int64_t threads = work < kInlineWork ? 1 : context_.pool.num_threads();
        if (threads > 1 && most_chunks > 1 && most_chunks * threads * 4 > chunks) {
            run_chunks(num_tiles);
        } else {
            const int64_t grain = threads == 1 ? num_tiles : context_.pool.even_grain(num_tiles, 16);
            context_.pool.parallel_for(num_tiles, grain, [this](int64_t begin, int64_t end, int) {
                for (int64_t i = begin; i < end; ++i) run_tile(static_cast<int32_t>(i));
            });
        }
    }

    static size_t scratch_bytes(int num_threads, int32_t num_seqs, int32_t padded_dim) {
        return static_cast<size_t>(round_up((num_seqs + 1) * int64_t{4}, 64) +
                                   round_up(num_threads * kPartialsPerThread * int64_t{sizeof(Item)}, 64) +
                                   (num_threads * kPartialsPerThread + 1) * partial_stride(padded_dim));
    }

private:
    static int64_t partial_stride(int32_t padded_dim) {
        return round_up(static_cast<int64_t>(partial_bytes(padded_dim)), 64);
    }

    void take_scratch() {
        const size_t wanted = scratch_bytes(context_.pool.num_threads(), batch_.num_seqs, layout_.padded_dim);
        if (context_.scratch_bytes < wanted)
            throw std::invalid_argument("attention: scratch of " + std::to_string(context_.scratch_bytes) +
                                        " bytes is bound, this step needs " + std::to_string(wanted));
        char* next = context_.scratch;
        tile_start_ = reinterpret_cast<int32_t*>(next);
        next += round_up((batch_.num_seqs + 1) * int64_t{4}, 64);
        items_ = reinterpret_cast<Item*>(next);
        num_slots_ = context_.pool.num_threads() * kPartialsPerThread;
        next += round_up(num_slots_ * int64_t{sizeof(Item)}, 64);
        partials_ = next;
    }

    AttentionPartial* partial(int64_t slot) const {
        return reinterpret_cast<AttentionPartial*>(partials_ + slot * partial_stride(layout_.padded_dim));
    }

    int64_t visible_keys(int64_t keys) const {
        return shape_.window > 0 ? std::min<int64_t>(shape_.window, keys) : keys;
    }

    int64_t tiles_across(int32_t s) const {
        return (batch_.query_start[s + 1] - batch_.query_start[s] + tokens_ - 1) / tokens_;
    }

    // Tiles of a sequence are numbered by KV head, part of its group, then tokens, so that neighbours share keys.
    Tile tile_at(int32_t index) const {
        const int32_t* above = std::upper_bound(tile_start_, tile_start_ + batch_.num_seqs + 1, index);
        const auto s = static_cast<int32_t>(above - tile_start_) - 1;
        const auto across = static_cast<int32_t>(tiles_across(s));
        const int32_t local = index - tile_start_[s];
        const int32_t group = shape_.num_heads / shape_.num_kv_heads;
        const int32_t part = local / across % parts_;
        Tile tile;
        tile.seq = s;
        tile.kv_head = local / across / parts_;
        tile.first_head = tile.kv_head * group + part * heads_;
        tile.num_heads = std::min(heads_, group - part * heads_);
        tile.first_token = batch_.query_start[s] + local % across * tokens_;
        tile.num_tokens = std::min(tokens_, batch_.query_start[s + 1] - tile.first_token);
        tile.first_position = batch_.context_lens[s] - (batch_.query_start[s + 1] - tile.first_token);
        tile.first_chunk = first_key(tile.first_position) / kKeyChunk;
        tile.last_chunk = (tile.first_position + tile.num_tokens - 1) / kKeyChunk;
        return tile;
    }

    int32_t first_key(int32_t position) const {
        return shape_.window > 0 ? std::max(0, position + 1 - shape_.window) : 0;
    }

    TileRows rows_of(const Tile& tile, const Matrix& m) const {
        const int64_t offset = tile.first_token * m.stride + tile.first_head * int64_t{shape_.head_dim};
        return {static_cast<char*>(m.data) + offset * static_cast<int64_t>(size_of(m.dtype)),
                m.dtype,
                m.stride,
                tile.num_tokens,
                tile.num_heads,
                shape_.head_dim};
    }

    AttentionChunk chunk_of(const Tile& tile, int32_t index) const {
        AttentionChunk chunk;
        const int32_t start = index * kKeyChunk;
        chunk.heads = tile.num_heads;
        chunk.head_dim = shape_.head_dim;
        chunk.padded_dim = layout_.padded_dim;
        chunk.first_token = tile.num_tokens;
        chunk.last_token = 0;
        for (int32_t j = 0; j < tile.num_tokens; ++j) {
            const int32_t position = tile.first_position + j;
            chunk.begin[j] = std::max(0, first_key(position) - start);
            chunk.end[j] = std::min(kKeyChunk, position + 1 - start);
            if (chunk.begin[j] >= chunk.end[j]) continue;
            chunk.first_token = std::min(chunk.first_token, j);
            chunk.last_token = j + 1;
        }
        const int32_t first_group = chunk.begin[chunk.first_token] / kKeyGroup;
        const int32_t last_group = (chunk.end[chunk.last_token - 1] - 1) / kKeyGroup;
        const int32_t* table = batch_.block_tables + static_cast<int64_t>(tile.seq) * batch_.table_width;
        for (int32_t g = first_group; g <= last_group; ++g) {
            const int32_t group = start / kKeyGroup + g;
            const int32_t in_block = group % layout_.groups_per_block;
            const char* head = static_cast<const char*>(kv_.blocks) +
                               table[group / layout_.groups_per_block] * layout_.block_bytes +
                               tile.kv_head * layout_.head_bytes;
            chunk.keys[g] = head + in_block * layout_.key_group_bytes;
            chunk.values[g] = head + layout_.values_offset + in_block * layout_.value_group_bytes;
        }
        return chunk;
    }

    void run_tile(int32_t index) const {
        alignas(64) float queries[kMaxTileRows * kQueryStride];
        alignas(64) AttentionPartial state, next;
        const Tile tile = tile_at(index);
        kernels_.load_queries(rows_of(tile, q_), kv_.dtype, shape_.scale, queries);
        int32_t started = 0;  // rows that have a state; those of later tokens may begin in a later chunk
        for (int32_t c = tile.first_chunk; c <= tile.last_chunk; ++c) {
            const AttentionChunk chunk = chunk_of(tile, c);
            kernels_.attend(chunk, kv_.dtype, queries, &next);
            started = add(&state, &next, chunk, started);
        }
        kernels_.write_rows(&state, rows_of(tile, out_), layout_.padded_dim);
    }

    // Rows before `started` are merged, the others begin with this partial. Returns how many have a state now.
    int32_t add(AttentionPartial* state, const AttentionPartial* next, const AttentionChunk& chunk,
                int32_t started) const {
        const int32_t first = chunk.first_token * chunk.heads, last = chunk.last_token * chunk.heads;
        const int32_t middle = std::max(first, std::min(started, last));
        kernels_.merge(state, next, first, middle, layout_.padded_dim);
        if (middle < last) {
            const size_t rows = static_cast<size_t>(last - middle), dim = static_cast<size_t>(layout_.padded_dim);
            std::memcpy(state->maximum + middle, next->maximum + middle, rows * sizeof(float));
            std::memcpy(state->sum + middle, next->sum + middle, rows * sizeof(float));
            std::memcpy(state->weighted + middle * dim, next->weighted + middle * dim, rows * dim * sizeof(float));
        }
        return std::max(started, last);
    }

    // All (tile, chunk) pairs in order, as many at a time as there are slots for their partials; after each such wave
    // the partials are merged in order. The tile that a wave ends in the middle of keeps its state for the next.
    void run_chunks(int32_t num_tiles) const {
        AttentionPartial* state = partial(num_slots_);
        int32_t started = 0;
        int64_t filled = 0;
        for (int32_t t = 0; t < num_tiles; ++t) {
            const Tile tile = tile_at(t);
            for (int32_t c = tile.first_chunk; c <= tile.last_chunk; ++c) {
                items_[filled++] = {t, c};
                const bool is_last = t == num_tiles - 1 && c == tile.last_chunk;
                if (filled < num_slots_ && !is_last) continue;
                context_.pool.parallel_for(filled, 1, [this](int64_t begin, int64_t end, int) {
                    for (int64_t i = begin; i < end; ++i) run_item(i);
                });
                for (int64_t i = 0; i < filled; ++i) {
                    const Tile done = tile_at(items_[i].tile);
                    if (items_[i].chunk == done.first_chunk) started = 0;
                    started = add(state, partial(i), chunk_of(done, items_[i].chunk), started);
                    if (items_[i].chunk == done.last_chunk)
                        kernels_.write_rows(state, rows_of(done, out_), layout_.padded_dim);
                }
                filled = 0;
            }
        }
    }

    void run_item(int64_t i) const {
        alignas(64) float queries[kMaxTileRows * kQueryStride];
        const Tile tile = tile_at(items_[i].tile);
        kernels_.load_queries(rows_of(tile, q_), kv_.dtype, shape_.scale, queries);
        kernels_.attend(chunk_of(tile, items_[i].chunk), kv_.dtype, queries, partial(i));
    }

    ops::Context& context_;
    const Matrix& q_;
    const KvLayer& kv_;
    const AttentionShape& shape_;
    const Batch& batch_;
    const Matrix& out_;
    const PageLayout layout_;
    const AttentionKernels& kernels_;
    const int32_t heads_, tokens_, parts_;
    int32_t* tile_start_ = nullptr;  // [S + 1]
    Item* items_ = nullptr;          // [num_slots_]
    char* partials_ = nullptr;       // num_slots_ of one wave, then the state that crosses from wave to wave
    int64_t num_slots_ = 0;
};

}  // namespace

size_t attention_scratch_bytes(const ops::Context& context, const StepLimits& limits, const AttentionShape& shape) {
    return PagedAttention::scratch_bytes(context.pool.num_threads(), limits.max_seqs, (shape.head_dim + 15) / 16 * 16);
}

void check_attention_shape(const AttentionShape& shape, int32_t block_size) {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("attention: " + what); };
    if (block_size <= 0 || block_size % kKeyGroup != 0)
        fail("block_size is " + std::to_string(block_size) + ", but must be a multiple of 16");
    if (shape.head_dim <= 0 || shape.head_dim % 2 != 0 || shape.head_dim > kMaxHeadDim)
        fail("head_dim is " + std::to_string(shape.head_dim) + ", but must be even and at most 256");
    if (shape.num_kv_heads <= 0 || shape.num_heads <= 0 || shape.num_heads % shape.num_kv_heads != 0)
        fail("num_heads is " + std::to_string(shape.num_heads) + ", but must be a multiple of num_kv_heads, " +
             std::to_string(shape.num_kv_heads));
    if (shape.rotary_dim < 0 || shape.rotary_dim % 2 != 0 || shape.rotary_dim > shape.head_dim)
        fail("rotary_dim is " + std::to_string(shape.rotary_dim) + ", but must be even and at most head_dim, " +
             std::to_string(shape.head_dim));
}

}  // namespace cpu

namespace ops {

size_t kv_block_bytes(DType dtype, int32_t block_size, const AttentionShape& shape) {
    cpu::check_attention_shape(shape, block_size);
    return static_cast<size_t>(cpu::PageLayout(dtype, block_size, shape).block_bytes);
}

void attention(Context& context, const Matrix& q, const KvLayer& kv, const AttentionShape& shape, const Batch& batch,
               const Matrix& out) {
    cpu::check_attention_shape(shape, kv.block_size);
    cpu::PagedAttention(context, q, kv, shape, batch, out).run();
}

}  // namespace ops

}  // namespace pyengine
