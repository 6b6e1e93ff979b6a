/* Tiles of K and V on their way to shared memory: each warp feeds stages of its own.
 *
 * Rows are copied as they are stored, a row to a row of the stage; what they lack of whole groups
 * is zeros. Formats whose values are read from anywhere are copied by 16 bytes wherever they lie:
 * from and to multiples of 16, with some bytes of neighbours; a row then begins some bytes behind
 * the beginning of its row in the stage. Rows that do not exist are zeros, in every format. So no
 * product meets what lies in the pool behind a sequence's end.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_STAGE_H
#define PAGEDCACHE_CUDA_ATTENTION_STAGE_H

#include "async_copy.h"
#include "attention.h"
#include "attention_values.h"

/* Keys of a tile: numbers first … first + count - 1, counted from the item's first block. */
struct pc_key_tile {
    int first, count;
};

PC_DEVICE pc_key_tile pc_tile_at(const pc_attention &call, int index) {
    const int run = (int)pc_divide(index, call.tiles_per_run);
    const int part = index - run * (int)call.tiles_per_run.divisor;
    const int left = call.run_keys - part * call.keys;
    return {run * call.run_keys + part * call.keys, left < call.keys ? left : call.keys};
}

/* The tile that holds a key. */
PC_DEVICE int pc_tile_of(const pc_attention &call, int key) {
    const int run = (int)pc_divide(key, call.run);
    return run * (int)call.tiles_per_run.divisor + (key - run * call.run_keys) / call.keys;
}

/* Where the lane's row of a tile lies: of K for lanes 0 … 15, of V for the others. */
struct pc_source {
    uint64_t pointer; /* of its block, in a pointer table */
    int32_t place;    /* -1: there is no such row */
    int32_t offset;   /* in the block */
};

PC_DEVICE pc_source pc_find_source(const pc_attention &call, const pc_cuda_attention_item &item,
                                   pc_key_tile tile, int lane) {
    const int row = lane % PC_KEYS, key = tile.first + row;
    pc_source source = {0, -1, 0};
    if (row < tile.count && key >= item.begin && key < item.end) {
        const int64_t index = pc_divide(key, call.block_size);
        const uint64_t *const pointers = call.pointers[lane / PC_KEYS];
        source.place = call.places != nullptr ? call.places[item.table + index] : 0;
        source.pointer = pointers != nullptr ? pointers[item.table + index] : 0;
        source.offset = (int32_t)(key - index * call.block_size.divisor);
    }
    return source;
}

/* Copy `count` rows, of which the first lies at `first` and each other one `step` behind the one
 * before it, by 16 bytes. Lanes share a row, 2^lanes_log2 each. */
PC_DEVICE void pc_stage_line(uint64_t first, int64_t step, int count, int units, int lanes_log2,
                             uint8_t *to, int row_step, int lane) {
    const int unit = lane & ((1 << lanes_log2) - 1), rows = PC_WARP >> lanes_log2;
    const int row = lane >> lanes_log2;
    for (int at = unit; at < units; at += PC_WARP) { /* one turn, but for rows above 512 bytes */
        const uint8_t *from = (const uint8_t *)(uintptr_t)first + row * step + at * 16;
        uint8_t *into = to + row * row_step + at * 16;
        PC_UNROLL_BY(4)
        for (int i = row; i < count; i += rows) {
            PC_ASSUME_GLOBAL(from);
            pc_copy_async<16>(into, from);
            from += rows * step;
            into += rows * row_step;
        }
    }
}

/* The same for rows that may begin between multiples of 16: from the one before, to the one behind
 * them. */
PC_DEVICE void pc_stage_rounded(uint64_t first, int64_t step, int count, int row_nbytes, int units,
                                int lanes_log2, uint8_t *to, int row_step, int lane) {
    const int unit = lane & ((1 << lanes_log2) - 1), rows = PC_WARP >> lanes_log2;
    for (int row = lane >> lanes_log2; row < count; row += rows) {
        const uint64_t source = first + (uint64_t)(row * step);
        for (int at = unit; at < units; at += PC_WARP) {
            const uint64_t from = source / 16 * 16 + (uint64_t)at * 16;
            if (from < source + (uint64_t)row_nbytes) {
                const uint8_t *const global = (const uint8_t *)(uintptr_t)from;
                PC_ASSUME_GLOBAL(global);
                pc_copy_async<16>(to + row * row_step + at * 16, global);
            }
        }
    }
}

/* The same for rows that lie anywhere; sources: their addresses, 0 for rows of zeros. What is
 * behind the end of a row is zeros. */
template <int UNIT>
PC_DEVICE void pc_stage_units(const uint64_t *sources, int count, int row_nbytes, int units,
                              int lanes_log2, uint8_t *to, int row_step, int lane) {
    for (int row = lane >> lanes_log2; row < count; row += PC_WARP >> lanes_log2) {
        const uint64_t source = sources[row];
        const uint64_t first = source / UNIT * UNIT, end = source + (uint64_t)row_nbytes;
        for (int unit = lane & ((1 << lanes_log2) - 1); unit < units; unit += 1 << lanes_log2) {
            uint8_t *const into = to + row * row_step + unit * UNIT;
            const uint8_t *const from = (const uint8_t *)(uintptr_t)(first + unit * UNIT);
            PC_ASSUME_GLOBAL(from);
            if (source == 0 || first + unit * UNIT >= end) {
                pc_store_unit<UNIT>(into, pc_unit<UNIT>{});
            } else if constexpr (UNIT >= 4) {
                pc_copy_async<UNIT>(into, from);
            } else {
                pc_store_unit<UNIT>(into, pc_load_unit<UNIT>(from));
            }
        }
    }
}

PC_DEVICE void pc_stage_rows(int unit, const uint64_t *sources, int count, int row_nbytes,
                             int units, int lanes_log2, uint8_t *to, int row_step, int lane) {
    switch (unit) {
#define PC_STAGE_CASE(unit)                                                                      \
    case unit:                                                                                   \
        pc_stage_units<unit>(sources, count, row_nbytes, units, lanes_log2, to, row_step, lane); \
        break;
        PC_STAGE_CASE(16)
        PC_STAGE_CASE(8)
        PC_STAGE_CASE(4)
        PC_STAGE_CASE(2)
    default: PC_STAGE_CASE(1)
#undef PC_STAGE_CASE
    }
}

/* Start the copies of a tile into a stage. Returns whether its block is open. */
PC_DEVICE bool pc_stage_tile(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                             pc_key_tile tile, const pc_source &source, uint8_t *stage, int lane) {
    uint64_t (*const sources)[PC_KEYS] =
        (uint64_t (*)[PC_KEYS])(void *)(stage + call.stage.sources_at);
    const bool open = call.has_open && __any_sync(~0u, source.place >= call.num_blocks);
    const int kind = lane / PC_KEYS, row = lane % PC_KEYS;
    const pc_side &own = call.sides[kind][open];
    uint64_t data = 0, scales = 0;
    if (source.place >= 0) {
        uint64_t block = source.pointer;
        if (call.pointers[kind] == nullptr) {
            block = (uint64_t)(uintptr_t)own.base + (uint64_t)(source.place * own.block_stride);
        }
        const int scale = own.by_tokens ? source.offset / PC_GROUP : source.offset;
        data = block + (uint64_t)(head * own.head_step + source.offset * own.token_step);
        scales =
            block + (uint64_t)(own.scales_at + head * own.scale_head_step + scale * own.scale_step);
    }
    sources[kind][row] = data;
    sources[2 + kind][row] = scales;
    __syncwarp();
    const bool line = call.one_block && tile.first >= item.begin && tile.count == call.keys &&
                      tile.first + call.keys <= item.end;
    /* a tile has one group of tokens: the first row that exists knows its scales */
    const int existing = item.begin > tile.first ? item.begin - tile.first : 0;
    PC_UNROLL
    for (int k = 0; k < 2; k++) {
        const pc_side &side = call.sides[k][open];
        uint8_t *const to = stage + call.stage.rows_at[k];
        if (line && side.lines) {
            pc_stage_line(sources[k][0], side.token_step, call.keys, side.units, side.lanes_log2,
                          to, side.row_step, lane);
        } else if (line && side.rounds) {
            pc_stage_rounded(sources[k][0], side.token_step, call.keys, side.row_nbytes, side.units,
                             side.lanes_log2, to, side.row_step, lane);
        } else {
            pc_stage_rows(side.unit, sources[k], call.keys, side.row_nbytes, side.units,
                          side.lanes_log2, to, side.row_step, lane);
        }
        uint8_t *const scales_to = stage + call.stage.scales_at[k];
        if (side.scale_units > 0 && line && side.scale_lines) {
            pc_stage_line(sources[2 + k][0], side.scale_step, side.by_tokens ? 1 : call.keys,
                          side.scale_units, side.scale_lanes_log2, scales_to, side.scale_row_step,
                          lane);
        } else if (side.scale_units > 0) {
            pc_stage_rows(side.scale_unit, sources[2 + k] + (side.by_tokens ? existing : 0),
                          side.by_tokens ? 1 : call.keys, side.scale_nbytes, side.scale_units,
                          side.scale_lanes_log2, scales_to, side.scale_row_step, lane);
        }
    }
    return open;
}

/* A warp's tiles of an item, one after the other, each staged some tiles ahead. */
class pc_feed {
  public:
    PC_DEVICE pc_feed(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                      uint8_t *stages, int warp, int lane)
        : call_(call), item_(item), head_(head), stages_(stages), lane_(lane) {
        const bool any = item.begin < item.end;
        first_ = any ? pc_tile_of(call, item.begin) + warp : 0;
        end_ = any ? pc_tile_of(call, item.end - 1) + 1 : 0;
    }

    PC_DEVICE void begin() {
        ahead_ = first_;
        now_ = first_ - call_.warps;
        fill_ = 0;
        drain_ = -1;
        opened_ = 0;
        source_ = find();
    }

    /* Start the copies of one more tile, and find out where the rows of the one behind it lie. */
    PC_DEVICE void stage_one() {
        __syncwarp(); /* all lanes are done with the tile that was in its place */
        if (ahead_ < end_) {
            const bool open = pc_stage_tile(call_, item_, head_, pc_tile_at(call_, ahead_), source_,
                                            stages_ + fill_ * call_.stage.nbytes, lane_);
            opened_ = (opened_ & ~(1u << fill_)) | (unsigned)open << fill_;
        }
        pc_commit_copies(); /* none, too: groups are counted */
        ahead_ += call_.warps;
        fill_ = fill_ + 1 < call_.stages ? fill_ + 1 : 0;
        source_ = find();
    }

    /* The stage of the next tile, which has arrived; NULL behind the last one. To be called where
     * as many tiles are staged as there are stages. */
    PC_DEVICE const uint8_t *next(bool &open) {
        now_ += call_.warps;
        if (now_ >= end_) {
            return nullptr;
        }
        pc_wait_for_copies(call_.stages - 1);
        __syncwarp(); /* what other lanes have copied is there */
        drain_ = drain_ + 1 < call_.stages ? drain_ + 1 : 0;
        open = (opened_ >> drain_ & 1) != 0;
        return stages_ + drain_ * call_.stage.nbytes;
    }

    PC_DEVICE pc_key_tile tile() const {
        return pc_tile_at(call_, now_);
    }

  private:
    PC_DEVICE pc_source find() const {
        const pc_source none = {0, -1, 0};
        return ahead_ < end_ ? pc_find_source(call_, item_, pc_tile_at(call_, ahead_), lane_)
                             : none;
    }

    const pc_attention &call_;
    const pc_cuda_attention_item &item_;
    const int head_;
    uint8_t *const stages_;
    const int lane_;
    int first_, end_, ahead_, now_, fill_, drain_;
    unsigned opened_; /* bit i: the tile in stage i is of an open block */
    pc_source source_;
};

/* Row `row` of a tile that has arrived. */
PC_DEVICE pc_staged_row pc_staged_row_of(const pc_attention &call, int kind, bool open,
                                         const uint8_t *stage, int row) {
    const pc_side &side = call.sides[kind][open];
    const uint8_t *data = stage + call.stage.rows_at[kind] + row * side.row_step;
    if (side.rounds) {
        data += *(const uint64_t *)(const void *)(stage + call.stage.sources_at +
                                                  (kind * PC_KEYS + row) * 8) %
                16;
    }
    return {data, stage + call.stage.scales_at[kind] + row * side.scale_row_step};
}

#endif
