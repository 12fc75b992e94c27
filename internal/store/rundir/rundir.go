package rundir

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Parent is where default run directories are made, below the working
// directory, and Latest is the name of the link to the newest of them.
const (
	Parent = "runs"
	Latest = "latest"
)

// Errors of [Create], which wraps them into one line that names the directory
// and what would be right.
var (
	ErrHasRun = errors.New("already holds a run")
	ErrInUse  = errors.New("is in use by another run")
	ErrCreate = errors.New("cannot be made or written")
)

// Dir is a run directory that this process owns.
type Dir struct {
	path   string // absolute
	shown  string // as to be shown to people
	parent string // where the link to the newest run belongs; "" for a directory outside of [Parent]
	made   string // highest directory that Create made; "" if all was there
	lock   *os.File
	locks  []*os.File // of the directory before it was made again, which may come back; one of an attached directory is its maker's

	mu      sync.Mutex
	lines   map[string]lineFile // by name, from WriteJob or Resume to Close
	held    map[string]*os.File // what was written once, open to be read; the same
	by      Leader              // that has continued the files; none for who made them
	gone    *RemovedError       // the directory was removed and cannot be made again
	reached []byte              // newest content of workers.json
	space   space
	own     []string // what this Dir made in the directory before it became a run, in the order of removal
	bin     bool     // MakeBin made the folder
	isRun   bool     // job.json is written
	again   bool     // of Resume
	workers bool     // workers.json is
	closed  bool

	attached bool // another process made it, and others may be writing

	inherited []byte // lines with which WriteJob begins skips.jsonl
}

// Create makes and locks the run directory path. An empty path means
// runs/PROGRAM-TIME below the working directory, with a number behind where that
// exists already. program is the base name of the program and now the time that
// goes into the name.
//
// A directory that is there already may hold other files, but none that a run
// would write, except an empty lock. The error is one of [ErrHasRun], [ErrInUse] and
// [ErrCreate], wrapped.
func Create(path, program string, now time.Time) (*Dir, error) {
	if path != "" {
		return createAt(path, false)
	}
	name := program + "-" + now.Format("20060102-150405")
	for i := 1; ; i++ {
		path := filepath.Join(Parent, name)
		if i > 1 {
			path += "-" + strconv.Itoa(i)
		}
		d, err := create(path, false)
		switch {
		case err == nil:
			if d.made != "" {
				return d, nil
			}
			// An empty directory of another process.
			_ = d.Close()
		case errors.Is(err, ErrHasRun), errors.Is(err, ErrInUse):
		default:
			return nil, fmt.Errorf("%s: %w; name a writable place with --run-dir DIR", path, err)
		}
	}
}

// CreateAgain is Create for a directory in which a run may have been killed before it began: what that has left is removed.
func CreateAgain(path string) (*Dir, error) { return createAt(path, true) }

func createAt(path string, again bool) (*Dir, error) {
	d, err := create(path, again)
	if err != nil {
		return nil, fmt.Errorf("--run-dir %s: %w", path, err)
	}
	return d, nil
}

// Attach returns the directory of a run for a process that writes its files, while another
// process owns the lock and closes it last. Close then removes nothing.
// shown is its path for messages. again says that the run is resumed: [Dir.WriteJob] continues its files.
func Attach(path, shown string, again bool) *Dir {
	d := &Dir{path: path, shown: shown, isRun: true, attached: true, again: again}
	d.setParent()
	if lock, err := openFile(d.File("lock"), os.O_RDWR); err == nil {
		d.locks = append(d.locks, lock) // so that it is known again
	}
	return d
}

// Resume continues the line files of a run that another process has begun to
// write. That process may still exist, frozen: later writes of it are lost,
// because copies replace the files. If a later leader has begun to, nothing more is replaced, and the error wraps [ErrReplaced].
func (d *Dir) Resume(by Leader) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	FreeReserve(d.path) // the copies may need it
	d.by = by
	if err := d.begin(by); err != nil {
		return err
	}
	err := d.openLines(func(name string) (*os.File, error) {
		if is := records[name]; is != nil {
			return d.takeOver(by, name, is)
		}
		return d.continueLines(name) // which may be long, and another line of that process among them does no damage
	})
	if err != nil {
		return err
	}
	var job Job
	if _, err := readJSON(d.File("job.json"), &job); err != nil {
		return err
	}
	d.setReserve(job)
	return d.hold()
}

// Adopt is for the owner of a directory whose files other processes have written: it
// becomes a run if job.json exists.
func (d *Dir) Adopt() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := os.Lstat(d.File("job.json")); err == nil {
		d.isRun = true
	}
	if _, err := os.Lstat(d.File("workers.json")); err == nil {
		d.workers = true
	}
}

func (d *Dir) setParent() {
	if dir, name := filepath.Split(d.path); filepath.Base(dir) == Parent && name != Latest {
		d.parent = filepath.Clean(dir)
	}
}

func create(path string, again bool) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCreate, err)
	}
	d := &Dir{path: abs, shown: filepath.Clean(path), made: firstMissing(abs)}
	d.setParent()
	if err := d.take(again); err != nil {
		if d.lock != nil {
			_ = d.discard()
			_ = d.lock.Close()
		}
		return nil, err
	}
	return d, nil
}

// files are the names that a run writes besides lock.
var files = []string{
	"job.json", "data.json", "metrics.jsonl", "events.jsonl", "plans.jsonl", "deliveries.jsonl", "skips.jsonl", "traces.jsonl", "summary.json",
	"config.json", "model.safetensors", "log", "bin", "workers.json", "agreement", "first", "checkpoints", "ui-token", AttachName,
}

// IsRecord reports whether a path is that of a file which a run has written, or would write, to its directory dir.
func IsRecord(dir, path string) bool {
	rest, err := filepath.Rel(resolve(dir), filepath.Join(resolve(filepath.Dir(path)), filepath.Base(path)))
	if err != nil {
		return false
	}
	first, _, _ := strings.Cut(rest, string(filepath.Separator))
	return slices.Contains(files, first) || first == "lock"
}

// resolve returns a path without links, as far as it is there.
func resolve(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		return resolved
	}
	return path
}

// AttachName is the link to the socket at which the launcher of a run shows it.
const AttachName = "attach"

// results are the files without which no step of a run can have been committed.
var results = []string{"job.json", "summary.json", "model.safetensors", "checkpoints"}

// clear removes what a run has left that did not begin.
func (d *Dir) clear() error {
	for _, name := range results {
		if _, err := os.Lstat(d.File(name)); !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	for _, name := range files {
		if err := os.RemoveAll(d.File(name)); err != nil {
			return fmt.Errorf("%w: %w; remove it", ErrCreate, err)
		}
	}
	return nil
}

// take makes the directory this process's own. again removes what a run has left that did not begin.
func (d *Dir) take(again bool) error {
	const remedy = "give a directory you may write to"
	if err := errors.Join(os.MkdirAll(filepath.Dir(d.path), 0o777), os.MkdirAll(d.path, 0o700)); err != nil {
		return fmt.Errorf("%w: %w; %s", ErrCreate, cause(err), remedy)
	}
	lock, err := os.OpenFile(d.File("lock"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	made := err == nil
	if errors.Is(err, fs.ErrExist) {
		lock, err = openFile(d.File("lock"), os.O_RDWR)
	}
	if err != nil {
		return fmt.Errorf("%w: %w; %s", ErrCreate, cause(err), remedy)
	}
	d.lock = lock
	if err := lockFile(lock); errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w; give another directory", ErrInUse)
	} else if err != nil {
		return fmt.Errorf("%w: lock: %w; give a directory on a file system with locks", ErrCreate, err)
	}
	if made {
		d.own = append(d.own, "lock")
	} else if info, err := lock.Stat(); err != nil || info.Size() > 0 {
		return hasRun("lock")
	} else if again {
		if err := d.clear(); err != nil {
			return err
		}
	}
	for _, name := range files {
		if _, err := os.Lstat(d.File(name)); !errors.Is(err, fs.ErrNotExist) {
			return hasRun(name)
		}
	}
	err = tighten(d.path)
	if err == nil {
		err = os.Mkdir(d.File("log"), 0o700)
	}
	if err != nil {
		return fmt.Errorf("%w: %w; %s", ErrCreate, cause(err), remedy)
	}
	d.own = append(d.own, "log", AttachName)
	return nil
}

// tighten lets only the owner of a directory enter it: other users must not read what a run writes, or reach its processes.
func tighten(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() == 0o700 {
		return err
	}
	return os.Chmod(path, 0o700)
}

func hasRun(name string) error {
	return fmt.Errorf("%w, or what would be in its place (%s is there); give another directory", ErrHasRun, name)
}

// firstMissing returns the highest directory on the way to path that is not there,
// "" if path is.
func firstMissing(path string) string {
	missing := ""
	for {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return missing
		}
		missing = path
		path = filepath.Dir(path)
	}
}

// cause strips the operation and the paths, which the message around has.
func cause(err error) error {
	if of := new(fs.PathError); errors.As(err, &of) {
		return of.Err
	}
	if of := new(os.LinkError); errors.As(err, &of) {
		return of.Err
	}
	return err
}

// Path returns the absolute path of the directory.
func (d *Dir) Path() string { return d.path }

// String returns the path as people gave it, or below the working directory.
func (d *Dir) String() string { return d.shown }

// File returns the absolute path of a file of the directory.
func (d *Dir) File(name string) string { return filepath.Join(d.path, name) }

// LogFile creates the file for the output of a worker's incarnation. In a resumed run, it
// may exist, and grows.
func (d *Dir) LogFile(id, incarnation int) (*os.File, error) {
	flags := os.O_CREATE | os.O_RDWR | os.O_APPEND
	if !d.again {
		flags |= os.O_TRUNC
	}
	path := d.File(fmt.Sprintf("log/worker-%d.%d.log", id, incarnation))
	f, err := openFile(path, flags)
	if IsMissing(err) { // the folder, which was there
		if _, err := d.makeLog(); err != nil {
			return nil, err
		}
		return openFile(path, flags)
	}
	return f, err
}

// empty returns a list as JSON shall have it: [] for none, never null.
func empty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// WriteJob writes data.json and job.json, opens the line files and points
// runs/latest to the directory: from here on it holds a run. In a resumed run, both files
// stay as they are, unless it is resumed as another job or from another place.
func (d *Dir) WriteJob(job Job, data []DataFile) error {
	data, job.Args = empty(data), empty(job.Args)
	if job.ModelConfig == nil {
		job.ModelConfig = json.RawMessage("null")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.again {
		return d.continueRun(job, data)
	}
	once := os.O_EXCL
	if d.attached {
		once = os.O_TRUNC
	}
	if err := d.openLines(func(name string) (*os.File, error) {
		f, err := openFile(d.File(name), os.O_CREATE|once|os.O_RDWR|os.O_APPEND)
		if err == nil {
			d.own = append(d.own, name)
		}
		return f, err
	}); err != nil {
		return err
	}
	if len(d.inherited) > 0 {
		_, err := d.lines[skipped].Write(d.inherited)
		if err = errors.Join(err, d.lines[skipped].Sync()); err != nil {
			return err
		}
		d.inherited = nil
	}
	if err := d.writeData(data); err != nil {
		return err
	}
	d.own = append(d.own, "data.json")
	if err := d.writeJSON("job.json", job); err != nil {
		return err
	}
	d.isRun = true
	d.setReserve(job)
	return errors.Join(d.hold(), d.link())
}

// openLines opens the line files.
func (d *Dir) openLines(open func(name string) (*os.File, error)) error {
	d.lines = make(map[string]lineFile)
	for _, name := range lineFiles {
		f, err := open(name)
		if err != nil {
			for _, other := range d.lines {
				err = errors.Join(err, other.Close())
			}
			d.lines = nil
			return err
		}
		d.lines[name] = f
	}
	return nil
}

// link makes runs/latest point to the directory, in one step for readers.
func (d *Dir) link() error {
	if d.parent == "" {
		return nil
	}
	link := filepath.Join(d.parent, Latest)
	if info, err := os.Lstat(link); err == nil && info.Mode().Type() != fs.ModeSymlink {
		return nil // not ours
	}
	temp := filepath.Join(d.parent, "."+Latest+"-"+strconv.Itoa(os.Getpid()))
	if err := os.Symlink(filepath.Base(d.path), temp); err != nil {
		return err
	}
	if err := os.Rename(temp, link); err != nil {
		_ = os.Remove(temp)
		return err
	}
	return nil
}

// WriteWorkers writes workers.json, which Close removes. It need not survive the machine.
func (d *Dir) WriteWorkers(w Workers) error {
	w.Workers = empty(w.Workers)
	text, err := json.Marshal(w)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.workers, d.reached = true, append(text, '\n')
	return d.must(workersName, d.reached, d.writeReached)
}

func (d *Dir) writeReached() error {
	temp := d.File("." + workersName)
	if err := os.WriteFile(temp, d.reached, 0o600); err != nil {
		_ = os.Remove(temp)
		return err
	}
	return rename(temp, d.File(workersName))
}

const workersName = "workers.json"

// WriteSummary syncs the line files and writes summary.json, for which it opens the reserve.
func (d *Dir) WriteSummary(s Summary) error {
	s = s.complete()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.space.reserve, d.space.reserved = 0, false
	FreeReserve(d.path)
	text, err := encodeJSON("summary.json", s)
	if err != nil {
		return err
	}
	return d.must("summary.json", text, func() error {
		if d.gone != nil && errors.Is(d.gone, ErrInUse) {
			return nil // the directory is another run's; Salvage writes it
		}
		for _, f := range d.lines {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		return WriteFile(d.File("summary.json"), text)
	})
}

// complete returns a summary without lists that are null.
func (s Summary) complete() Summary {
	s.Recoveries, s.Workers = empty(s.Recoveries), slices.Clone(empty(s.Workers))
	for i := range s.Workers {
		w := &s.Workers[i]
		w.Stages, w.Layers = empty(w.Stages), empty(w.Layers)
	}
	return s
}

func (d *Dir) writeJSON(name string, v any) error {
	text, err := encodeJSON(name, v)
	if err != nil {
		return err
	}
	return WriteFile(d.File(name), text)
}

// writeData writes data.json, a line for each file. Training waits for it, and there may be ten thousand.
func (d *Dir) writeData(files []DataFile) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	between := "[\n"
	for i := range files {
		b.WriteString(between)
		if err := enc.Encode(&files[i]); err != nil {
			return fmt.Errorf("data.json: %w", err)
		}
		b.Truncate(b.Len() - 1) // the end of the line
		between = ",\n"
	}
	if len(files) == 0 {
		b.WriteString("[")
	}
	b.WriteString("\n]\n")
	return WriteFile(d.File("data.json"), b.Bytes())
}

func encodeJSON(name string, v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b.Bytes(), nil
}

// Close gives the directory back. If it became no run, because WriteJob was
// never called, everything that Create made is removed again.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	err := d.flush()
	if len(d.space.late) > 0 {
		err = d.putElsewhere(err)
	}
	if !d.attached {
		FreeReserve(d.path)
		d.forgetLeaders()
	}
	for _, f := range d.lines {
		err = errors.Join(err, f.Close())
	}
	for _, f := range d.held {
		err = errors.Join(err, f.Close())
	}
	d.lines, d.held = nil, nil
	if d.bin && d.gone == nil {
		err = errors.Join(err, os.RemoveAll(d.File("bin")))
	}
	if d.workers && !d.attached {
		if e := os.Remove(d.File(workersName)); !isMissing(d.File(workersName)) {
			err = errors.Join(err, e)
		}
	}
	if !d.isRun && !d.again {
		err = errors.Join(err, d.discard())
	}
	for _, lock := range append(d.locks, d.lock) {
		if lock != nil {
			err = errors.Join(err, lock.Close())
		}
	}
	return err
}

// discard removes what this Dir made, and nothing else.
func (d *Dir) discard() error {
	for _, name := range d.own {
		if name == "agreement" || name == "first" {
			if err := os.RemoveAll(d.File(name)); err != nil {
				return err
			}
		}
		var logs []string
		if name == "log" {
			logs, _ = filepath.Glob(d.File("log/*.log"))
		}
		for _, path := range append(logs, d.File(name)) {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
				return err
			}
		}
	}
	if d.made == "" {
		return nil
	}
	for path := d.path; ; path = filepath.Dir(path) {
		if os.Remove(path) != nil || path == d.made {
			return nil // not empty: something else is there
		}
	}
}
