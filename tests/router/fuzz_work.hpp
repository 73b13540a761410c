// See fuzz_work.cpp.
#pragma once

extern unsigned long long work;
