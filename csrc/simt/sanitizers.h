// sanitizers.h: what the engine tells ThreadSanitizer (SIMT_TSAN) and AddressSanitizer (SIMT_ASAN), and nothing in
// other builds. The engine itself is never compiled with a sanitizer: its own memory is no concern of theirs.
//
// To ThreadSanitizer every CUDA thread is a thread of its own. A switch between fibers orders no memory; barriers do,
// by release() of all threads before and acquire() after. Blocks of one launch are not ordered among themselves.
#pragma once

#include <cstddef>

#ifdef SIMT_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif
#ifdef SIMT_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, std::size_t* old_size);
void __asan_unpoison_memory_region(const volatile void* address, std::size_t size);
}
#endif

namespace simt::sanitizer {

#ifdef SIMT_TSAN
constexpr bool kThreads = true;
inline void* create_thread() { return __tsan_create_fiber(0); }
inline void destroy_thread(void* thread) { __tsan_destroy_fiber(thread); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void switch_to(void* thread) { __tsan_switch_to_fiber(thread, 1 /* orders nothing */); }
inline void release(void* fence) { __tsan_release(fence); }
inline void acquire(void* fence) { __tsan_acquire(fence); }
inline void note_read(const void* from, std::size_t bytes) { __tsan_read_range(const_cast<void*>(from), bytes); }
inline void note_write(void* to, std::size_t bytes) { __tsan_write_range(to, bytes); }
inline void ignore_accesses() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void heed_accesses() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
constexpr bool kThreads = false;
inline void* create_thread() { return nullptr; }
inline void destroy_thread(void*) {}
inline void* this_thread() { return nullptr; }
inline void switch_to(void*) {}
inline void release(void*) {}
inline void acquire(void*) {}
inline void note_read(const void*, std::size_t) {}
inline void note_write(void*, std::size_t) {}
inline void ignore_accesses() {}
inline void heed_accesses() {}
#endif

#ifdef SIMT_ASAN
constexpr bool kAddresses = true;
inline void leave_stack(void** fake_stack, const void* new_bottom, std::size_t new_size) {
    __sanitizer_start_switch_fiber(fake_stack, new_bottom, new_size);
}
inline void arrive_on_stack(void* fake_stack, const void** old_bottom, std::size_t* old_size) {
    __sanitizer_finish_switch_fiber(fake_stack, old_bottom, old_size);
}
inline void forget_stack(void* bottom, std::size_t size) { __asan_unpoison_memory_region(bottom, size); }
#else
constexpr bool kAddresses = false;
inline void leave_stack(void**, const void*, std::size_t) {}
inline void arrive_on_stack(void*, const void**, std::size_t*) {}
inline void forget_stack(void*, std::size_t) {}
#endif

}  // namespace simt::sanitizer
