package rundir

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoRun is wrapped by the error of [Read] for a directory without a run.
var ErrNoRun = errors.New("holds no run")

// Record is what a run directory says of its run, which may be under way.
type Record struct {
	Path    string
	Running bool // a process owns the directory
	Job     Job
	Plan    *Plan    // the newest; nil before the first
	Last    *Metrics // the newest step; nil before the first
	ValLoss *float64 // of the newest evaluation, as far as the end of metrics.jsonl tells
	Event   *Event   // the newest
	Calls   Calls
	Gone    []Event // of workers that were lost or have left, the newest first

	Saved   *Event // of the newest checkpoint since the run began or was resumed; nil for none
	Starved *Event // steps wait for data since then
	Unsaved *Event // why there is no newer one, where making one has failed since
	Full    *Event // the disk is full, and training holds; nil where it has room
	Began   *Event // start or resume

	Notes []string // what [Resume] has moved aside, in a sentence each

	Recoveries []Recovery // the newest first
	Summary    *Summary   // nil until the run has ended, and for one that was killed
}

// tailSize is how much of a line file's end is read.
const tailSize = 16 << 20

// Read reads a run directory. Files that are not there leave their fields empty, except job.json,
// without which there is no run.
func Read(path string) (Record, error) {
	r := Record{Path: path, Running: Running(path)}
	var err error
	if r.Job, r.Summary, r.Plan, err = readRun(path); err != nil {
		return r, err
	}
	room, fed := false, false // there is again, and data keep up
	r.Event, err = lastOf(filepath.Join(path, events), func(e *Event) bool {
		switch {
		case e.Kind == "lost" || e.Kind == "left":
			r.Gone = append(r.Gone, *e)
		case e.Kind == "checkpoint" && r.Saved == nil:
			r.Saved = e
		case e.Kind == "unsaved" && r.Saved == nil && r.Unsaved == nil:
			r.Unsaved = e
		case e.Kind == "fed":
			fed = true
		case e.Kind == "starved" && !fed && r.Starved == nil:
			r.Starved = e
		case e.Kind == "room":
			room = true
		case e.Kind == "full" && !room && r.Full == nil:
			r.Full = e
		case e.Kind == "start" || e.Kind == "resume":
			r.Began = e
		case e.Recovery != nil:
			r.Recoveries = append(r.Recoveries, *e.Recovery)
		}
		return e.Kind == "resume" // what was before is about other processes
	})
	if err != nil {
		return r, err
	}
	r.Last, err = lastOf(filepath.Join(path, metrics), func(m *Metrics) bool {
		if r.ValLoss == nil {
			r.ValLoss = m.ValLoss
		}
		return r.ValLoss != nil
	})
	if r.Summary != nil {
		r.ValLoss = r.Summary.ValLoss
	}
	if err == nil {
		r.Calls, err = readCalls(path)
	}
	return r, err
}

// maxSkips bounds the lines of skips.jsonl that are read.
const maxSkips = 1 << 20

// ReadSkips returns the samples that a run has skipped, each as often as it has.
func ReadSkips(path string) (all []uint64, err error) {
	_, err = lastOf(filepath.Join(path, skipped), func(s *Skip) bool {
		all = append(all, s.Sample)
		return len(all) == maxSkips
	})
	slices.Reverse(all)
	return all, err
}

// Committed returns the newest step that was ever committed of the run as it is now, also if the run has gone back since; 0 for none.
// Steps of before it was resumed with something changed are those of another job.
func Committed(path string) (step int, err error) {
	var since uint64
	if _, err := lastOf(filepath.Join(path, events), func(e *Event) bool {
		if e.Kind == "changed" {
			since = e.Plan
		}
		return since > 0
	}); err != nil {
		return 0, err
	}
	_, err = lastOf(filepath.Join(path, metrics), func(m *Metrics) bool {
		if m.Plan >= since {
			step = max(step, m.Step)
		}
		return m.Plan < since
	})
	return step, err
}

// MaxSkipLines bounds the lines of skips.jsonl that are kept with a checkpoint, in bytes.
const MaxSkipLines = 64 << 20

// SkipLines returns the whole lines of skips.jsonl as they are, none where there is no such file. The run may be writing it.
func SkipLines(path string) ([]byte, error) {
	path = filepath.Join(path, skipped)
	f, err := Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, cause(err))
	}
	defer f.Close()
	var lines bytes.Buffer
	in := &io.LimitedReader{R: f, N: MaxSkipLines + 1}
	if _, err := sift(in, isRecord[Skip], &lines, io.Discard); err != nil {
		return nil, fmt.Errorf("%s: %w", path, cause(err))
	}
	if in.N == 0 {
		return nil, fmt.Errorf("%s has more than %d bytes", path, MaxSkipLines)
	}
	return lines.Bytes(), nil
}

// Calls say for which steps OnStep was called.
type Calls struct {
	Newest *Delivery // nil before the first worker was to make the calls
	Due    []Metrics // later steps, in order, for which it has yet to be called
}

// readCalls reads deliveries.jsonl, and of metrics.jsonl what was committed since.
func readCalls(path string) (c Calls, err error) {
	c.Newest, err = lastOf[Delivery](filepath.Join(path, deliveries), nil)
	if err != nil || c.Newest == nil {
		return c, err
	}
	lines := 0
	_, err = lastOf(filepath.Join(path, metrics), func(m *Metrics) bool {
		// After a rollback, steps have several lines, with the same numbers.
		if m.Step > c.Newest.Step && !slices.ContainsFunc(c.Due, func(x Metrics) bool { return x.Step == m.Step }) {
			c.Due = append(c.Due, *m)
		}
		lines++
		return lines == historySteps
	})
	slices.SortFunc(c.Due, func(a, b Metrics) int { return a.Step - b.Step })
	return c, err
}

// readRun reads the job, the summary and the newest plan of a run, as far as they are there; the job has to be.
func readRun(path string) (j Job, s *Summary, p *Plan, err error) {
	found, err := readJSON(filepath.Join(path, "job.json"), &j)
	if err == nil && !found {
		err = fmt.Errorf("%s %w: give the directory of a run, such as %s", path, ErrNoRun, filepath.Join(Parent, Latest))
	}
	if err != nil {
		return j, nil, nil, err
	}
	if s, err = readOptional[Summary](filepath.Join(path, "summary.json")); err != nil {
		return j, s, nil, err
	}
	p, err = lastOf[Plan](filepath.Join(path, plans), nil)
	return j, s, p, err
}

// Running reports whether a process holds the lock of a run directory.
func Running(path string) bool {
	f, err := Open(filepath.Join(path, "lock"))
	if err != nil {
		return false
	}
	defer f.Close() // gives the lock back
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if err == nil {
		_ = os.Remove(filepath.Join(path, workersName)) // of a process that was killed
		_ = os.Remove(filepath.Join(path, AttachName))  // the same
		FreeReserve(path)
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}

// maxJSON bounds a file that is read as a whole, in bytes.
const maxJSON = 256 << 20

func readJSON(path string, v any) (found bool, err error) {
	b, err := readAtMost(path, maxJSON)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", path, cause(err))
	}
	return true, nil
}

func readOptional[T any](path string) (*T, error) {
	v := new(T)
	found, err := readJSON(path, v)
	if !found {
		v = nil
	}
	return v, err
}

// lastOf returns the last record of a line file, nil if it has none. enough, where it is not nil, is
// shown the records from the last one backwards until it says so. Lines that are no records do not count.
func lastOf[T record](path string, enough func(*T) bool) (*T, error) {
	f, err := Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, cause(err))
	}
	defer f.Close()
	tail, from, err := readTail(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, cause(err))
	}
	// What follows the last line end is being written.
	tail = tail[:bytes.LastIndexByte(tail, '\n')+1]
	var last *T
	for len(tail) > 0 {
		begin := bytes.LastIndexByte(tail[:len(tail)-1], '\n') + 1
		if begin == 0 && from > 0 {
			break // a part of a line
		}
		v := parseLine[T](tail[begin:])
		tail = tail[:begin]
		if v == nil {
			continue
		}
		if last == nil {
			last = v
		}
		if enough == nil || enough(v) {
			break
		}
	}
	return last, nil
}

// readTail reads the end of a file, which begins at from.
func readTail(f *os.File) (tail []byte, from int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	from = max(0, info.Size()-tailSize)
	tail, err = io.ReadAll(io.NewSectionReader(f, from, tailSize))
	return tail, from, err
}

// ReadWorkers reads workers.json; the error of a run that is not under way is [ErrNotRunning].
func ReadWorkers(path string) (w Workers, err error) {
	found := Running(path)
	if found {
		found, err = readJSON(filepath.Join(path, workersName), &w)
	}
	if err == nil && !found {
		err = fmt.Errorf("%s %w", path, ErrNotRunning)
	}
	return w, err
}

// ErrNotRunning is the class of errors for a run that is not under way.
var ErrNotRunning = errors.New("is no run that is under way")

// Log is the log of one incarnation of a worker.
type Log struct {
	Worker, Incarnation int
	Path                string
}

// Logs returns the logs of a run directory, by worker and incarnation.
func Logs(path string) ([]Log, error) {
	names, err := readDir(filepath.Join(path, "log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var logs []Log
	for _, e := range names {
		name, ok1 := strings.CutPrefix(e.Name(), "worker-")
		name, ok2 := strings.CutSuffix(name, ".log")
		id, incarnation, ok3 := strings.Cut(name, ".")
		w, err1 := strconv.Atoi(id)
		i, err2 := strconv.Atoi(incarnation)
		if ok1 && ok2 && ok3 && err1 == nil && err2 == nil {
			logs = append(logs, Log{w, i, filepath.Join(path, "log", e.Name())})
		}
	}
	slices.SortFunc(logs, func(a, b Log) int {
		return cmp.Or(a.Worker-b.Worker, a.Incarnation-b.Incarnation)
	})
	return logs, nil
}

// History is what has happened in a run so far, for a successor.
type History struct {
	Job  Job
	Last *Metrics // the newest step

	Committed int // see the function

	ValLoss *float64 // of the newest evaluation
	Plan    *Plan    // the newest
	Summary *Summary // of a run that has ended

	Lost, Rollbacks int
	Recoveries      []Recovery // in their order
	Unrecovered     []Event    // of workers that were lost since the newest recovery, in their order

	// Workers that were started during the run: how many incarnations of each, how many have joined,
	// by which plan each joined last, and which have yet to join. Away are workers that were lost with a host and
	// not replaced.
	Started  map[int]int
	Joined   int
	JoinedBy map[int]uint64
	Joining  []int
	Away     map[int]string

	Calls Calls

	// Of the newest steps, enough of them to give the throughput of the run.
	Tokens int64
	MS     float64
}

// ReadHistory reads what a run directory says of its run.
func ReadHistory(path string) (h History, err error) {
	if h.Job, h.Summary, h.Plan, err = readRun(path); err != nil {
		return h, err
	}
	h.Started, h.JoinedBy, h.Away = make(map[int]int), make(map[int]uint64), make(map[int]string)
	seen := make(map[int]bool)
	if _, err = lastOf(filepath.Join(path, events), func(e *Event) bool {
		switch e.Kind {
		case "begin", "joined", "lost", "left", "refused":
			if !seen[e.Worker] && e.Kind == "begin" {
				h.Joining = append(h.Joining, e.Worker)
			}
			if !seen[e.Worker] && e.Host != "" {
				h.Away[e.Worker] = e.Host
			}
			seen[e.Worker] = true
		}
		switch {
		case e.Kind == "begin":
			h.Started[e.Worker]++
		case e.Kind == "joined":
			h.Joined++
			if _, newer := h.JoinedBy[e.Worker]; !newer {
				h.JoinedBy[e.Worker] = e.Plan
			}
		case e.Kind == "lost":
			if h.Lost++; len(h.Recoveries) == 0 {
				h.Unrecovered = append(h.Unrecovered, *e)
			}
		case e.Kind == "rollback":
			h.Rollbacks++
		case e.Recovery != nil:
			h.Recoveries = append(h.Recoveries, *e.Recovery)
		}
		return false
	}); err != nil {
		return h, err
	}
	slices.Reverse(h.Recoveries)
	slices.Reverse(h.Unrecovered)
	slices.Sort(h.Joining)
	steps := 0
	h.Last, err = lastOf(filepath.Join(path, metrics), func(m *Metrics) bool {
		if h.ValLoss == nil {
			h.ValLoss = m.ValLoss
		}
		h.Tokens += m.Tokens
		h.MS += m.MS
		steps++
		return steps == historySteps
	})
	if err == nil {
		h.Committed, err = Committed(path)
	}
	if err == nil {
		h.Calls, err = readCalls(path)
	}
	return h, err
}

// historySteps is how many steps a history is long.
const historySteps = 1000

// FileSHA256 returns the SHA-256 of a file in lower-case hexadecimal.
func FileSHA256(path string) (string, error) {
	f, err := Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
