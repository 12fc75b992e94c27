package lab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Ours is in the environment of all processes that a measurement starts, so that [Watch] can tell them from others.
const Ours = "SOLITON_BENCH_ALL=1"

// Watch finds out how much of the processors other programs use. Their time is that of all processes that are not ours, with that of their
// children that have ended, and what the hypervisor gave to other machines. Processes that this system hides are not in it.
type Watch struct {
	stop  chan struct{}
	share chan float64
}

// watchEvery is how often a Watch looks, so that it misses little of processes that come and go.
const watchEvery = time.Second

// NewWatch begins to watch. Share ends it.
func NewWatch() *Watch {
	w := &Watch{make(chan struct{}), make(chan float64, 1)}
	go func() {
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		known := make(map[process]bool)
		began, ticks := time.Now(), 0
		before, ok := othersTicks(known)
		for on := true; on && ok; {
			select {
			case <-tick.C:
			case <-w.stop:
				on = false
			}
			var now int
			if now, ok = othersTicks(known); now > before { // it sinks when a process ends that nobody of them waits for
				ticks += now - before
			}
			before = now
		}
		if !ok {
			w.share <- -1
			return
		}
		// Times are counted in ticks, so those of a short watch may be more than there was.
		w.share <- min(1, float64(ticks)/hertz/time.Since(began).Seconds()/float64(runtime.NumCPU()))
	}()
	return w
}

// Share ends the watch and returns the share of all processors that others used; negative where the system does not tell.
func (w *Watch) Share() float64 {
	close(w.stop)
	return <-w.share
}

// hertz is the unit of processor times in /proc, the same on all of Linux.
const hertz = 100

// process is one process, by its number and start.
type process struct{ pid, start int }

// othersTicks returns the processor time of all processes that are not ours, from the start of each. known keeps which are ours.
func othersTicks(known map[process]bool) (ticks int, ok bool) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, false
	}
	ticks = stolen(string(stat))
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		p, used, counts := parseStat(string(text))
		if !counts || p.pid == os.Getpid() {
			continue
		}
		ours, seen := known[p]
		if !seen {
			env, err := os.ReadFile(filepath.Join(filepath.Dir(name), "environ"))
			ours = err == nil && bytes.Contains(append(env, 0), []byte(Ours+"\x00"))
			known[p] = ours
		}
		if !ours {
			ticks += used
		}
	}
	return ticks, true
}

// stolen reads from /proc/stat what the hypervisor gave to others.
func stolen(stat string) int {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	if len(f) < 9 || f[0] != "cpu" {
		return 0
	}
	n, _ := strconv.Atoi(f[8])
	return n
}

// parseStat reads /proc/PID/stat: the processor time of a process and of its children that it has waited for, but for the first
// process, which waits for everyone's orphans. Threads of the kernel work for others, and the time of a zombie is about to be its
// parent's: they do not count.
func parseStat(text string) (p process, ticks int, counts bool) {
	var number int
	if _, err := fmt.Sscan(text, &number); err != nil {
		return p, 0, false
	}
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" || f[1] == "2" || number == 2 {
		return p, 0, false
	}
	p.pid = number
	p.start, _ = strconv.Atoi(f[19])
	times := f[11:15]
	if number == 1 {
		times = f[11:13]
	}
	for _, field := range times {
		n, _ := strconv.Atoi(field)
		ticks += n
	}
	return p, ticks, true
}
