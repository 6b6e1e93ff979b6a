/* Runs a launch: CTA by CTA, warp by warp, each lane until it waits or ends. */
#pragma once

#include "faults.h"
#include "machine.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string.h>

namespace pc_emulation {

inline void start_on(Fiber *fiber, Thread *thread) {
    thread->fiber = fiber;
    thread->state = State::running;
    machine.current = thread;
}

inline void fiber_main() {
    begin_unwatched();
    Fiber *self = machine.current->fiber;
    arrived(self);
    for (;;) {
        machine.side->whole.leave();
        end_unwatched();
        machine.launch->kernel();
        begin_unwatched();
        machine.side->whole.arrive();
        machine.current->state = State::done;
        if (!watches_races) { // there, every CUDA thread keeps an identity of its own
            auto &order = machine.order;
            while (machine.next < machine.warp_end && order[machine.next]->state != State::fresh)
                machine.next++;
            if (machine.next < machine.warp_end) { // lanes that never wait share a fiber
                start_on(self, order[machine.next++]);
                continue;
            }
            machine.idle_fibers.push_back(self);
        }
        switch_fiber(self, &host_fiber);
    }
}

inline Fiber *fiber_for(Thread *thread) {
    if (watches_races && thread->fiber)
        return thread->fiber;
    if (machine.idle_fibers.empty())
        return new_fiber(fiber_main);
    Fiber *fiber = machine.idle_fibers.back();
    machine.idle_fibers.pop_back();
    return fiber;
}

inline bool same_place(const Thread &a, const Thread &b) {
    return a.line == b.line && !strcmp(a.file, b.file);
}

/* Lanes whose whole mask waits at one operation exchange their values and are ready again. Lanes
 * that have ended count as missing: shuffles would read what is undefined on a device. */
inline bool resolve_warp(Thread *const *lanes, unsigned count) {
    Thread *by_lane[32] = {};
    for (unsigned i = 0; i < count; i++)
        by_lane[lanes[i]->lane()] = lanes[i];
    bool resolved = false;
    for (unsigned i = 0; i < count; i++) {
        const Thread &first = *lanes[i];
        if (first.state != State::at_warp_operation)
            continue;
        unsigned here = 0, votes = 0;
        for (Thread *other : by_lane) {
            if (!other || other->state != State::at_warp_operation || other->mask != first.mask ||
                other->operation != first.operation)
                continue;
            if (first.operation != WarpOperation::sync && !same_place(*other, first))
                continue;
            here |= 1u << other->lane();
            votes |= unsigned(other->value != 0) << other->lane();
        }
        if ((first.mask & (~0u >> (32 - count))) != here)
            continue;
        for (Thread *other : by_lane) {
            if (!other || !(here >> other->lane() & 1))
                continue;
            const bool inside = here >> other->source_lane & 1;
            other->result = other->operation == WarpOperation::ballot ? votes
                            : inside ? by_lane[other->source_lane]->value
                                     : 0xbadbadbadbadbadbu; // undefined on a device
        }
        for (Thread *other : by_lane)
            if (other && here >> other->lane() & 1)
                other->state = State::ready;
        if (lanes[i]->operation == WarpOperation::sync)
            machine.side->warps[lanes[i]->number / 32].open();
        resolved = true;
    }
    return resolved;
}

// Continues lanes [begin, begin + count) of the order until all of them wait for others or ended.
inline void run_warp(size_t begin, unsigned count) {
    do {
        for (size_t i = begin; i < begin + count && !machine.failed; i++) {
            Thread *thread = machine.order[i];
            machine.next = i + 1;
            machine.warp_end = begin + count;
            if (thread->state == State::fresh) {
                start_on(fiber_for(thread), thread);
                switch_fiber(&host_fiber, thread->fiber);
            } else if (thread->state == State::ready) {
                machine.current = thread;
                thread->state = State::running;
                switch_fiber(&host_fiber, thread->fiber);
            }
        }
    } while (!machine.failed && resolve_warp(&machine.order[begin], count));
}

// All threads wait or ended. Opens the barrier; returns whether there was one, or fails.
inline bool open_barrier() {
    const Thread *first = nullptr;
    for (const Thread *thread : machine.order) {
        if (thread->state == State::at_warp_operation) {
            fail_thread(*thread, thread->file, thread->line,
                        "waits for lanes of its mask that never come");
            return false;
        }
        if (thread->state != State::at_barrier)
            continue;
        if (first && !same_place(*first, *thread)) {
            fail_thread(*thread, thread->file, thread->line,
                        std::string("other threads of its CTA wait at ") + first->file + ":" +
                            std::to_string(first->line));
            return false;
        }
        first = thread;
    }
    machine.side->whole.open(); // also where all have ended: for the CTA that comes after the next
    for (Thread *thread : machine.order)
        if (thread->state == State::at_barrier)
            thread->state = State::ready;
    return first;
}

inline void run_cta() {
    machine.side->shared.begin_cta();
    for (Thread *thread : machine.order) {
        thread->state = State::fresh;
        thread->products = 0;
        thread->fences.begin_cta();
        thread->open_copies.clear();
        thread->committed_copies.clear();
    }
    const size_t count = machine.order.size();
    do {
        for (size_t i = 0; i < count && !machine.failed;) {
            const unsigned first = machine.order[i]->number / 32 * 32;
            const unsigned lanes = std::min<unsigned>(32, unsigned(count) - first);
            run_warp(i, lanes);
            i += lanes;
        }
    } while (!machine.failed && open_barrier());
    if (!machine.failed && !machine.side->shared.gaps_are_intact())
        fail_launch(launch_failure, "wrote past the end of an array in shared memory");
}

inline void shuffle_threads(std::vector<Thread *> &order, std::mt19937 &random) {
    std::shuffle(order.begin(), order.end(), random);
    std::vector<unsigned> rank((order.size() + 31) / 32);
    std::iota(rank.begin(), rank.end(), 0u);
    std::shuffle(rank.begin(), rank.end(), random);
    std::stable_sort(order.begin(), order.end(), [&](const Thread *a, const Thread *b) {
        return rank[a->number / 32] < rank[b->number / 32];
    });
}

// The threads of one side in the order asked for; what `random` gives is the same for both sides.
inline std::vector<Thread *> order_threads(Side &side, const Launch &launch, std::mt19937 random) {
    const dim3 &cta = launch.cta;
    const unsigned count = cta.x * cta.y * cta.z;
    while (side.threads.size() < count)
        side.threads.emplace_back();
    std::vector<Thread *> order;
    for (unsigned i = 0; i < count; i++) {
        Thread &thread = side.threads[i];
        thread.number = i;
        thread.index = {i % cta.x, i / cta.x % cta.y, i / (cta.x * cta.y)};
        order.push_back(&thread);
    }
    if (launch.order == "rev")
        std::reverse(order.begin(), order.end());
    else if (launch.order != "fwd")
        shuffle_threads(order, random);
    return order;
}

// Runs every CTA; 0 or an error code of the CUDA runtime, with machine.failure saying why.
inline int run_launch(const Launch &launch) {
    std::lock_guard<std::mutex> one_at_a_time(machine.mutex);
    Unwatched unwatched;
    adopt_host_thread();
    [[maybe_unused]] FaultTrap trap;
    machine.launch = &launch;
    machine.grid = launch.grid;
    machine.cta = launch.cta;
    machine.failed = false;
    machine.failure_code = 0; // a failure is forgotten once a later launch runs
    machine.failure.clear();

    std::mt19937 random(unsigned(strtoul(launch.order.c_str(), nullptr, 10)));
    const dim3 &grid = launch.grid;
    std::vector<uint64_t> ctas(uint64_t(grid.x) * grid.y * grid.z);
    std::iota(ctas.begin(), ctas.end(), 0);
    if (launch.order == "rev")
        std::reverse(ctas.begin(), ctas.end());
    else if (launch.order != "fwd")
        std::shuffle(ctas.begin(), ctas.end(), random);
    std::vector<Thread *> orders[2];
    for (int i = 0; i < 2; i++) {
        orders[i] = order_threads(machine.sides[i], launch, random);
        machine.sides[i].shared.begin_launch(launch.shared_nbytes);
        machine.sides[i].whole.host_opens();
    }
    for (size_t i = 0; i < ctas.size() && !machine.failed; i++) {
        const uint64_t at = ctas[i];
        machine.cta_index = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y),
                             unsigned(at / grid.x / grid.y)};
        machine.side = &machine.sides[i % 2];
        machine.order.swap(orders[i % 2]);
        run_cta();
        machine.order.swap(orders[i % 2]);
    }
    for (Side &side : machine.sides) {
        side.whole.host_closes();
        if (machine.failed) // fibers that wait for ever are left behind
            for (Thread &thread : side.threads)
                thread.fiber = nullptr;
    }
    machine.current = nullptr;
    return machine.failed ? machine.failure_code : 0;
}

} // namespace pc_emulation
