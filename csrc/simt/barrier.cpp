// barrier.cpp: where the threads of a block wait for one another.
#include <cstring>

#include "block.h"

namespace simt {
namespace {

constexpr char kBarrier[] = "__syncthreads";

void release_all() {
    BlockBarrier& barrier = block.barrier;
    barrier.result_votes = barrier.votes;
    barrier.result_arrived = barrier.arrived;
    barrier.arrived = barrier.votes = 0;
    barrier.phase ^= 1;
    // As if they all started anew: in the order of their numbers, backwards, or any.
    std::array<int, kMaxThreads> waiting;
    int n = 0;
    for (int i = 0; i < block.num_threads; i++) {
        Thread& t = block.threads[i];
        if (t.waits_for != kBarrier) continue;
        t.waits_for = nullptr;
        waiting[n++] = i;
    }
    make_ready(waiting.data(), n);
}

}  // namespace

int meet_block(int predicate, Vote vote, Site at) {
    Thread& t = block.running();
    BlockBarrier& barrier = block.barrier;
    t.at = at;
    if (barrier.arrived && (barrier.at.line != at.line || std::strcmp(barrier.at.file, at.file) != 0))
        fail("threads of one block wait at different barriers: " + describe(barrier.at) + " and " + describe(at), at);
    barrier.at = at;
    char* const fence = &barrier.fences[barrier.phase];
    sanitizer::release(fence);
    barrier.arrived++;
    barrier.votes += predicate != 0;
    if (barrier.arrived < block.num_live) {
        t.waits_for = kBarrier;
        wait();
    } else {
        release_all();
        if (block.order.is_random() && block.order.draw() & 1) yield();
    }
    sanitizer::acquire(fence);
    if (vote == Vote::count) return barrier.result_votes;
    if (vote == Vote::all) return barrier.result_votes == barrier.result_arrived;
    return barrier.result_votes != 0;
}

// Those who wait at the barrier no longer wait for a thread that has ended.
void thread_has_ended() {
    if (block.barrier.arrived && block.barrier.arrived == block.num_live) release_all();
}

}  // namespace simt
