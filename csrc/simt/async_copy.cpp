// async_copy.cpp: cp.async. A copy happens as late as hardware may make it, when its thread waits for it, or at once:
// both are allowed, and a kernel that misses a wait or overwrites a source too early shows with one of them.
#include <cstring>

#include "block.h"

namespace simt {
namespace {

void carry_out(const AsyncCopy& copy) {
    std::memcpy(copy.to, copy.from, copy.source_bytes);
    std::memset(static_cast<char*>(copy.to) + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes, int source_bytes, Site at) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async copies 4, 8 or 16 bytes", at);
    if (source_bytes < 0 || source_bytes > bytes) fail("cp.async: more bytes come from memory than are copied", at);
    require_aligned(shared, bytes, "cp.async", at);
    require_aligned(global, bytes, "cp.async", at);
    const auto* to = static_cast<const unsigned char*>(shared);
    if (to < block.shared.data() || to + bytes > block.shared.data() + block.shared.size())
        fail("cp.async writes outside shared memory", at);
    sanitizer::note_read(global, source_bytes);
    sanitizer::note_write(shared, bytes);
    Thread& t = block.running();
    const AsyncCopy copy{shared, global, bytes, source_bytes, t.groups_committed};
    if (block.order.copies_late())
        t.copies.push_back(copy);
    else
        carry_out(copy);
}

void copy_commit() { block.running().groups_committed++; }

void copy_wait(int groups_left) {
    Thread& t = block.running();
    std::size_t done = 0;
    for (; done < t.copies.size() && t.copies[done].group < t.groups_committed - groups_left; done++) {
        sanitizer::note_write(t.copies[done].to, t.copies[done].bytes);
        carry_out(t.copies[done]);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + done);
}

}  // namespace simt
