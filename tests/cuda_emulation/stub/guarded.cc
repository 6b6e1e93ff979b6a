/* Memory between pages that nobody may touch. The range ends where the page behind it begins, up to
 * its alignment; what is left is filled and looked at later, or forbidden to AddressSanitizer. */
#include "state.h"

#include <string.h>
#include <sys/mman.h>

// AddressSanitizer's, where the process runs under it.
extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(void const volatile *, size_t);
[[gnu::weak]] void __asan_unpoison_memory_region(void const volatile *, size_t);
}

namespace stub {

namespace {

constexpr size_t page = 4096;
constexpr unsigned char filling = 0xCD;
constexpr size_t max_retired = 8192; // the system allows some 65000 mappings

std::map<Address, size_t> &retired = *new std::map<Address, size_t>;
std::deque<Address> &retired_in_turn = *new std::deque<Address>;

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

char *usable_begin(const Guarded &range) {
    return range.map + page;
}
char *usable_end(const Guarded &range) {
    return range.map + range.map_nbytes - page;
}

void set_access(const Guarded &range, bool beside) {
    auto *change = beside ? __asan_unpoison_memory_region : __asan_poison_memory_region;
    if (!change)
        return;
    change(usable_begin(range), size_t(range.start - usable_begin(range)));
    change(range.start + range.nbytes, size_t(usable_end(range) - range.start - range.nbytes));
}

bool is_filled(const char *at, const char *end) {
    for (; at < end; at++)
        if (static_cast<unsigned char>(*at) != filling)
            return false;
    return true;
}

} // namespace

bool make_guarded(Guarded &range, size_t nbytes, size_t alignment) {
    const size_t rounded = round_up(nbytes, alignment);
    if (rounded < nbytes || nbytes > size_t(1) << 46)
        return false;
    const size_t map_nbytes = round_up(rounded, page) + 2 * page;
    void *map = mmap(nullptr, map_nbytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return false;
    range.map = static_cast<char *>(map);
    range.map_nbytes = map_nbytes;
    range.nbytes = nbytes;
    range.start = usable_end(range) - rounded;
    mprotect(range.map, page, PROT_NONE);
    mprotect(usable_end(range), page, PROT_NONE);
    if (nbytes <= size_t(knob("poison_max")))
        memset(range.start, filling, nbytes);
    memset(usable_begin(range), filling, size_t(range.start - usable_begin(range)));
    memset(range.start + nbytes, filling, rounded - nbytes);
    set_access(range, false);
    return true;
}

bool is_intact(const Guarded &range) {
    set_access(range, true);
    const bool intact = is_filled(usable_begin(range), range.start) &&
                        is_filled(range.start + range.nbytes, usable_end(range));
    set_access(range, false);
    return intact;
}

void forbid_access(const Guarded &range) {
    mprotect(range.map, range.map_nbytes, PROT_NONE);
}

void retire(const Guarded &range) {
    set_access(range, true);
    forbid_access(range);
    madvise(range.map, range.map_nbytes, MADV_DONTNEED);
    const Address start = reinterpret_cast<Address>(range.map);
    retired[start] = range.map_nbytes;
    retired_in_turn.push_back(start);
    if (retired_in_turn.size() > max_retired) {
        const Address oldest = retired_in_turn.front();
        retired_in_turn.pop_front();
        munmap(reinterpret_cast<void *>(oldest), retired[oldest]);
        retired.erase(oldest);
    }
}

bool is_retired(Address address) {
    auto after = retired.upper_bound(address);
    if (after == retired.begin())
        return false;
    --after;
    return address < after->first + after->second;
}

} // namespace stub
