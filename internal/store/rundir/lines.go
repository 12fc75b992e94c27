package rundir

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// The names of the line files.
const (
	metrics    = "metrics.jsonl"
	events     = "events.jsonl"
	plans      = "plans.jsonl"
	deliveries = "deliveries.jsonl"
	skipped    = "skips.jsonl"
	traces     = "traces.jsonl"
)

// lineFiles are the files that grow by whole lines.
var lineFiles = []string{metrics, events, plans, deliveries, skipped, traces}

// lineFile is a line file under its name, open to be written to its end.
type lineFile interface {
	io.WriteCloser
	io.ReaderAt
	Sync() error
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
}

// record is what a line of a line file holds.
type record interface{ whole() bool }

// maxNumber is more steps, and plans, than a run has. What continues from a record adds to its numbers.
const maxNumber = 1<<31 - 1

func (m Metrics) whole() bool { return m.Step > 0 && m.Step <= maxNumber && m.Plan < maxNumber/2 }
func (e Event) whole() bool   { return e.Kind != "" }
func (p Plan) whole() bool    { return len(p.Plan) > 0 }
func (s Skip) whole() bool    { return !s.Time.IsZero() }

func (d Delivery) whole() bool {
	return d.Step >= 0 && d.Worker >= 0 && d.Incarnation >= 0 && !slices.ContainsFunc(d.Files, func(f LineFile) bool { return f.Size < 0 })
}

// parseLine returns the record of a line, nil for a line without one.
func parseLine[T record](line []byte) *T {
	v := new(T)
	if json.Unmarshal(line, v) != nil || !(*v).whole() {
		return nil
	}
	return v
}

func isRecord[T record](line []byte) bool { return parseLine[T](line) != nil }

// records say what a line of the line files must be that are read again.
var records = map[string]func(line []byte) bool{
	metrics: isRecord[Metrics], events: isRecord[Event], plans: isRecord[Plan], deliveries: isRecord[Delivery], skipped: isRecord[Skip],
}

// maxLine bounds a line in bytes: a longer one is no record.
const maxLine = tailSize

// sift copies the lines that are records to good and the others to bad, and counts these. A line without an end is the one that a
// killed process was writing: it goes nowhere, unless it is too long for that. It takes the memory of one record.
func sift(r io.Reader, is func(line []byte) bool, good, bad io.Writer) (dropped int, err error) {
	in, line, long := bufio.NewReaderSize(r, 1<<16), []byte(nil), false
	for {
		part, err := in.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) && !errors.Is(err, io.EOF) {
			return dropped, err
		}
		whole, last := err == nil, errors.Is(err, io.EOF)
		line = append(line, part...)
		if !long && len(line) > maxLine {
			long = true
			dropped++
		}
		to := bad
		switch {
		case long:
		case !whole && !last:
			continue
		case last:
			return dropped, nil
		case is(line):
			to = good
		default:
			dropped++
		}
		if _, err := to.Write(line); err != nil {
			return dropped, err
		}
		if line, long = line[:0], long && !whole; last {
			return dropped, nil
		}
	}
}

// lateFile is made when something is written to it.
type lateFile struct {
	path string
	f    *os.File
}

func (l *lateFile) Write(b []byte) (n int, err error) {
	if l.f == nil {
		if l.f, err = openFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY); err != nil {
			return 0, err
		}
	}
	return l.f.Write(b)
}

func (l *lateFile) close() error {
	if l.f == nil {
		return nil
	}
	return errors.Join(l.f.Sync(), l.f.Close())
}

// siftTo copies the records of a line file to another file, and moves what is none to a file beside it.
func (d *Dir) siftTo(name string, is func(line []byte) bool, from io.Reader, good io.Writer) (dropped int, err error) {
	bad := &lateFile{path: d.File(name) + badSuffix}
	out := bufio.NewWriterSize(good, 1<<16)
	dropped, err = sift(from, is, out, bad)
	return dropped, errors.Join(err, out.Flush(), bad.close())
}

// badSuffix ends the names of files with what was no record.
const badSuffix = ".bad"

// setAside moves what is no record out of the line files, and says in a sentence for each that has such lines where they are now.
// Files without them stay as they are.
func (d *Dir) setAside() (notes []string, err error) {
	for _, name := range lineFiles {
		is := records[name]
		if is == nil {
			continue
		}
		dropped, err := d.setAsideOf(name, is)
		if err != nil {
			return notes, fmt.Errorf("%s: %w", d.File(name), cause(err))
		}
		if dropped > 0 {
			notes = append(notes, fmt.Sprintf("%s: lines that are no records were moved to %s (%d)", name, name+badSuffix, dropped))
		}
	}
	return notes, nil
}

func (d *Dir) setAsideOf(name string, is func(line []byte) bool) (dropped int, err error) {
	f, err := Open(d.File(name))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if dropped, err = sift(f, is, io.Discard, io.Discard); err != nil || dropped == 0 {
		return 0, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	good, err := NewFile(d.File(name))
	if err != nil {
		return 0, err
	}
	if dropped, err = d.siftTo(name, is, f, good); err != nil {
		good.Discard()
		return 0, err
	}
	return dropped, good.Commit()
}

// Leader is a leadership of a run among hosts that share its directory. A later one has a greater generation, or term.
type Leader struct {
	Generation int
	Term       uint64
}

// ErrReplaced means that another host has led since.
var ErrReplaced = errors.New("another host leads the run now")

// leaderPrefix begins the names of empty files, one for each leadership that has begun to take the records over: nothing
// that is written in one step could be taken back by a leader that sleeps in the middle of it. A later leadership removes those before.
const leaderPrefix = ".leader-"

func (l Leader) name() string {
	return fmt.Sprintf("%s%010d-%020d", leaderPrefix, l.Generation, l.Term)
}

// begin leaves a leader's mark.
func (d *Dir) begin(l Leader) error {
	f, err := openFile(d.File(l.name()), os.O_CREATE|os.O_WRONLY)
	if err != nil {
		return err
	}
	return f.Close()
}

// leads reports whether no later leader has left its mark, and removes those of earlier ones.
func (d *Dir) leads(l Leader) bool { return d.replaced(l) == nil }

// replaced returns [ErrReplaced] if a later leader has left its mark, or why that is unknown, and removes the marks of earlier ones.
func (d *Dir) replaced(l Leader) error {
	entries, err := readDir(d.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case !strings.HasPrefix(name, leaderPrefix):
		case name > l.name():
			return ErrReplaced
		case name < l.name():
			_ = os.Remove(d.File(name)) // or the next one does
		}
	}
	return nil
}

// forgetLeaders removes the marks of all leaders, and the copies of those that were killed. No leader is there any more, or yet.
func (d *Dir) forgetLeaders() {
	entries, _ := readDir(d.path) // a directory that is gone has none
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, ".") && strings.Contains(name, leaderPrefix) {
			_ = os.Remove(d.File(name)) // it takes no room to speak of
		}
	}
}

// takeOver copies the records of a file. Between the look whether a later leader does the same and the new name are two calls of the
// system; a leader that was frozen anywhere else before, and wakes, changes nothing.
func (d *Dir) takeOver(by Leader, name string, is func(line []byte) bool) (*os.File, error) {
	from, err := Open(d.File(name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.File(name), cause(err))
	}
	defer from.Close()
	part := d.File("." + name + by.name()) // which no other leader has
	f, err := openFile(part, os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND)
	if err != nil {
		return nil, err
	}
	if _, err = d.siftTo(name, is, from, f); err == nil {
		if err = d.replaced(by); err == nil {
			err = rename(part, d.File(name))
		}
	}
	if err != nil {
		_ = os.Remove(part) // it may be gone
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// dropPart cuts off a line that was not written to its end.
func dropPart(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	for end := info.Size(); end > 0; {
		part := buf[:min(end, int64(len(buf)))]
		end -= int64(len(part))
		if _, err := f.ReadAt(part, end); err != nil {
			return err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			if end += int64(i) + 1; end == info.Size() {
				return nil
			}
			return f.Truncate(end)
		}
	}
	if info.Size() == 0 {
		return nil
	}
	return f.Truncate(0)
}

// AddMetrics appends a line to metrics.jsonl. WriteJob comes first.
func (d *Dir) AddMetrics(m Metrics) error { return d.addLine(metrics, m) }

// AddEvent appends a line to events.jsonl. WriteJob comes first.
func (d *Dir) AddEvent(e Event) error { return d.addLine(events, e) }

// AddPlan appends a line to plans.jsonl. WriteJob comes first.
func (d *Dir) AddPlan(p Plan) error { return d.addLine(plans, p) }

// AddDelivery appends a line to deliveries.jsonl. WriteJob comes first.
func (d *Dir) AddDelivery(x Delivery) error { return d.addLine(deliveries, x) }

// AddSkip appends a line to skips.jsonl, and returns when it is on the disk. WriteJob comes first.
func (d *Dir) AddSkip(s Skip) error {
	if err := d.addLine(skipped, s); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lines[skipped].Sync()
}

// InheritSkips has WriteJob begin skips.jsonl of a new run directory with the lines of the same run elsewhere.
func (d *Dir) InheritSkips(lines []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inherited = lines
}

// AddTrace appends a line of OTLP JSON to traces.jsonl, where the disk has room to spare. WriteJob comes first.
func (d *Dir) AddTrace(line []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.space.lost {
		d.space.lost = false
		return errors.New("traces.jsonl was emptied: the disk was full")
	}
	if err := CheckSpace(d.path, int64(len(line)), SpareTraces); err != nil {
		return fmt.Errorf("traces.jsonl: %w", err)
	}
	return d.writeLine(traces, append(line[:len(line):len(line)], '\n'))
}

func (d *Dir) addLine(name string, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.must(name, line, func() error { return d.writeLine(name, line) })
}

// writeLine appends a line with its end, or nothing.
func (d *Dir) writeLine(name string, line []byte) error {
	f := d.lines[name]
	if f == nil {
		return errors.New("rundir: line written outside of WriteJob and Close")
	}
	n, err := f.Write(line)
	if err != nil && n > 0 {
		// A disk that is full took a part of the line; readers get whole ones.
		if info, e := f.Stat(); e == nil {
			err = errors.Join(err, f.Truncate(info.Size()-int64(n)))
		}
	}
	return err
}
