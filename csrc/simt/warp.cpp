// warp.cpp: where the lanes of a warp wait for one another.
#include "block.h"

namespace simt {
namespace {

std::string describe(const WarpMeeting& meeting) {
    return std::string(meeting.instruction) + " at " + describe(meeting.at);
}

WarpMeeting& find_meeting(Warp& warp, unsigned mask, const char* instruction, Combine combine, Site at) {
    for (int i = 0; i < warp.num_meetings; i++) {
        WarpMeeting& meeting = warp.meetings[i];
        if (meeting.mask == mask) {
            if (meeting.combine != combine || meeting.at.line != at.line || meeting.instruction != instruction)
                fail(std::string("lanes of one warp diverged: one waits at ") + describe(meeting) +
                         ", another comes to " + instruction + " at " + describe(at),
                     at);
            return meeting;
        }
        if (meeting.mask & mask)
            fail("lanes of one warp wait with masks that overlap but differ: one at " + describe(meeting) +
                     ", another at " + describe(at),
                 at);
    }
    WarpMeeting& meeting = warp.meetings[warp.num_meetings++];
    meeting.mask = meeting.lanes.mask = mask;
    meeting.arrived = 0;
    meeting.instruction = instruction;
    meeting.at = at;
    meeting.combine = combine;
    return meeting;
}

}  // namespace

void meet_warp(unsigned mask, const char* instruction, const void* in, void* out, Combine combine, Site at) {
    Thread& t = block.running();
    t.at = at;
    if (!(mask >> t.lane & 1)) fail(std::string(instruction) + ": its mask leaves out the lane that calls it", at);
    Warp& warp = block.warps[t.warp];
    WarpMeeting& meeting = find_meeting(warp, mask, instruction, combine, at);
    meeting.arrived |= 1u << t.lane;
    meeting.lanes.in[t.lane] = in;
    meeting.lanes.out[t.lane] = out;
    if (!combine) sanitizer::release(&warp);
    if (meeting.arrived != mask) {
        t.waits_for = instruction;
        wait();
    } else {
        if (combine) {
            block.is_combining = true;
            sanitizer::ignore_accesses();
            combine(meeting.lanes);
            sanitizer::heed_accesses();
            block.is_combining = false;
        }
        WarpMeeting& last = warp.meetings[--warp.num_meetings];
        if (&last != &meeting) meeting = last;
        make_ready(t.warp, mask & ~(1u << t.lane));
        if (block.order.is_random() && block.order.draw() & 1) yield();
    }
    if (!combine) sanitizer::acquire(&warp);
}

void note_read(const void* from, int bytes) { sanitizer::note_read(from, static_cast<std::size_t>(bytes)); }

}  // namespace simt
