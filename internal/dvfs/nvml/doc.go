// Package nvml has the clocks of NVIDIA graphics cards, through NVIDIA's management library.
//
// The library is loaded when [Open] is called. Programs that import this package build and run on
// machines without it; where cgo is off, or the system is not Linux, Open always says that there is none.
//
// Set lets a card run at a frequency at most (nvmlDeviceSetGpuLockedClocks from the lowest frequency to the given one),
// which takes root or CAP_SYS_ADMIN. The library does not tell whether another process had locked the clocks before, so
// Restore gives the choice back to the card (nvmlDeviceResetGpuLockedClocks).
package nvml
