/* Copies from global to shared memory that are on their way until the thread waits for them. The
 * destination holds bytes 0xff until then: reading it too early shows. */
#pragma once

#include "machine.h"

#include <string.h>
#include <utility>

inline void __pipeline_memcpy_async(void *shared, const void *global, size_t nbytes) {
    memset(shared, 0xff, nbytes);
    pc_emulation::Unwatched unwatched;
    pc_emulation::machine.current->open_copies.push_back({shared, global, nbytes});
}

inline void __pipeline_commit() {
    pc_emulation::Unwatched unwatched;
    pc_emulation::Thread &self = *pc_emulation::machine.current;
    self.committed_copies.push_back(std::exchange(self.open_copies, {}));
}

// Waits until at most `newest` of the committed groups are still on their way.
inline void __pipeline_wait_prior(size_t newest) {
    auto &groups = pc_emulation::machine.current->committed_copies;
    for (; groups.size() > newest; groups.pop_front())
        for (const pc_emulation::PendingCopy &copy : groups.front())
            memcpy(copy.destination, copy.source, copy.nbytes);
}
