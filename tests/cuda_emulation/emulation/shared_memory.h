/* Shared memory of one CTA: the dynamic part, then every PC_SHARED array where it is first touched.
 * All of it starts as bytes 0xff (NaN in every float format). Between the arrays lie gaps:
 * forbidden to AddressSanitizer, and looked at after each CTA in the other builds. */
#pragma once

#include "sanitizers.h"

#include <string.h>
#include <vector>

namespace pc_emulation {

constexpr size_t max_static_shared = 48 << 10, max_shared = 227 << 10, shared_gap = 64;

class SharedMemory {
  public:
    void begin_launch(size_t dynamic_nbytes) {
        allow(arena_, sizeof arena_);
        memset(arena_, 0xff, end_);
        forbid(arena_, sizeof arena_);
        pieces_.clear();
        end_ = static_total_ = 0;
        dynamic_ = place(&dynamic_, dynamic_nbytes, 16);
    }

    void begin_cta() {
        for (const Piece &piece : pieces_)
            memset(piece.address, 0xff, piece.nbytes);
    }

    char *dynamic() const {
        return dynamic_;
    }

    // The array that the variable behind `tag` names; nullptr where the CTA has too much of them.
    char *array(const void *tag, size_t nbytes, size_t alignment) {
        for (const Piece &piece : pieces_)
            if (piece.tag == tag)
                return piece.address;
        static_total_ += nbytes;
        if (static_total_ > max_static_shared)
            return nullptr;
        char *address = place(tag, nbytes, alignment);
        memset(address, 0xff, nbytes);
        return address;
    }

    bool gaps_are_intact() const {
        if (watches_addresses)
            return true;
        const char *at = arena_;
        for (const Piece &piece : pieces_) {
            for (; at < piece.address; at++)
                if (*at != '\xff')
                    return false;
            at = piece.address + piece.nbytes;
        }
        for (; at < arena_ + end_; at++)
            if (*at != '\xff')
                return false;
        return true;
    }

  private:
    struct Piece {
        const void *tag;
        char *address;
        size_t nbytes;
    };

    char *place(const void *tag, size_t nbytes, size_t alignment) {
        size_t start = (end_ + shared_gap + 15) / 16 * 16;
        // No better aligned than the type asks for: 16-byte accesses to it must not go unnoticed.
        if (alignment < 16)
            start += 8;
        char *address = arena_ + start;
        allow(address, nbytes);
        pieces_.push_back({tag, address, nbytes});
        end_ = start + nbytes + shared_gap;
        return address;
    }

    alignas(128) char arena_[512 << 10] = {};
    std::vector<Piece> pieces_;
    size_t end_ = sizeof arena_, static_total_ = 0;
    char *dynamic_ = nullptr;
};

} // namespace pc_emulation
