// Instruction-set levels: which are compiled in, which one this process uses, and the table of kernels of each.
//
// A source file in per_level/ is compiled once per level, into `namespace triforce::TF_LEVEL`, and defines tables of
// function pointers. Its header declares each of them with TF_KERNEL_TABLE(Type, name); `name()` is then the table of
// the level in use, for code that is compiled once.
#pragma once

#include <vector>

#include "levels.hpp"  // written by CMake: TF_LEVELS(X, ...) calls X(level, ...) for each level compiled in, ascending

namespace triforce {

/// The levels that this CPU can run, slowest first.
std::vector<const char*> usable_levels();

/// The index of the level in use: the best level that can run, unless `use` has been called.
int level();
const char* level_name();

/// Throws std::invalid_argument if there is no such level, or this CPU cannot run it. Must not be called while kernels
/// run.
void use(const char* name);

#define TF_DECLARE_TABLE(level, Type, name) \
    namespace level {                       \
    extern const Type name;                 \
    }
#define TF_ADDRESS_OF_TABLE(level, Type, name) &level::name,

#ifdef TF_LEVEL  // Code of one level must not use the table of another level.
#define TF_KERNEL_TABLE(Type, name) TF_LEVELS(TF_DECLARE_TABLE, Type, name)
#else
#define TF_KERNEL_TABLE(Type, name)                                                        \
    TF_LEVELS(TF_DECLARE_TABLE, Type, name)                                                \
    inline const Type& name() {                                                            \
        static const Type* const tables[] = {TF_LEVELS(TF_ADDRESS_OF_TABLE, Type, name)};  \
        return *tables[level()];                                                           \
    }
#endif

}  // namespace triforce
