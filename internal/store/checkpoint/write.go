package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
)

const (
	folder       = "checkpoints" // in the run directory
	manifestName = "manifest.json"
	stepPrefix   = "step-"
	tempSuffix   = ".tmp"
)

// stepDir returns the directory of a step's checkpoint, below the run directory.
func stepDir(step int) string { return path.Join(folder, fmt.Sprintf("%s%08d", stepPrefix, step)) }

// parseStep is the inverse of the base name of stepDir.
func parseStep(name string) (step int, ok bool) {
	digits, ok := strings.CutPrefix(name, stepPrefix)
	step, err := strconv.Atoi(digits)
	return step, ok && err == nil && step >= 0 && name == path.Base(stepDir(step))
}

// Part is what one owner has of a checkpoint.
type Part struct {
	Job    string     // identity of the job
	Step   int        // steps that are in the state
	Plan   id.Version // plan of the step
	Worker int        // ID of the owner
	Rule   string     // adamw or sgd
	Shards []Shard    // those without parameters are left out of the file
}

// Shard is the state of a range.
type Shard struct {
	id.Range
	Params  []float32
	Moments [][]float32 // in the order of package zero
}

// Validate reports all that is wrong with a part.
func (p *Part) Validate() error {
	errs := identity(p.Job, p.Step, p.Plan, p.Rule)
	errs.If(p.Worker < 0, "worker: %d is below 0", p.Worker)
	moments := len(rules[p.Rule])
	for i, s := range p.Shards {
		switch n := s.Hi - s.Lo; {
		case s.Layer < 0 || s.Lo < 0 || n < 0:
			errs.Add(fmt.Errorf("shards[%d]: [%d,%d) of layer %d is no range", i, s.Lo, s.Hi, s.Layer))
		case len(s.Params) != n:
			errs.Add(fmt.Errorf("shards[%d]: %d parameters; [%d,%d) has %d", i, len(s.Params), s.Lo, s.Hi, n))
		case len(s.Moments) != moments && moments > 0:
			errs.Add(fmt.Errorf("shards[%d]: %d moments; %s has %d", i, len(s.Moments), p.Rule, moments))
		case slices.ContainsFunc(s.Moments, func(m []float32) bool { return len(m) != n }):
			errs.Add(fmt.Errorf("shards[%d]: a moment has not the %d numbers of [%d,%d)", i, n, s.Lo, s.Hi))
		}
	}
	ranges := p.ranges()
	slices.SortFunc(ranges, id.Range.Compare)
	for i := range ranges {
		if i > 0 && ranges[i].Layer == ranges[i-1].Layer && ranges[i].Lo < ranges[i-1].Hi {
			errs.Add(fmt.Errorf("shards: [%d,%d) and [%d,%d) of layer %d overlap", ranges[i-1].Lo, ranges[i-1].Hi, ranges[i].Lo, ranges[i].Hi, ranges[i].Layer))
		}
	}
	return errs.Err()
}

// ranges returns the ranges of the shards that are not empty.
func (p *Part) ranges() []id.Range {
	ranges := []id.Range{}
	for _, s := range p.Shards {
		if s.Lo < s.Hi {
			ranges = append(ranges, s.Range)
		}
	}
	return ranges
}

// Write writes the file of one owner into the run directory dir, and returns once it is on disk. If it
// fails, it leaves nothing under the file's name.
func Write(ctx context.Context, dir string, p Part) (File, error) {
	return writePart(ctx, openDisk, dir, p, nil)
}

// WritePaced is [Write] for a processor and a disk that others need: whenever 4 MiB more are on their way to the disk, it calls rest with
// the bytes that it has written, which may take its time.
func WritePaced(ctx context.Context, dir string, p Part, rest func(written int64)) (File, error) {
	return writePart(ctx, openDisk, dir, p, rest)
}

func writePart(ctx context.Context, open opener, dir string, p Part, rest func(written int64)) (File, error) {
	if err := p.Validate(); err != nil {
		return File{}, fmt.Errorf("checkpoint: part of worker %d: %w", p.Worker, err)
	}
	if err := rundir.CheckSpace(dir, p.size(), rundir.SpareCheckpoints); err != nil {
		return File{}, fmt.Errorf("checkpoint: %w", err)
	}
	step, err := createStep(open, dir, p.Step)
	if err != nil {
		return File{}, fmt.Errorf("checkpoint: %w", err)
	}
	defer step.Close()
	f := File{
		Name:   fmt.Sprintf("plan-%d.%d-worker-%d.safetensors", p.Plan.Generation, p.Plan.N, p.Worker),
		Ranges: p.ranges(),
	}
	err = replace(step, f.Name, p.size(), func(w io.Writer) error {
		sum := sha256.New()
		counted := &counter{ctx: ctx, w: io.MultiWriter(sum, w), rest: rest}
		if err := p.encode(counted); err != nil {
			return err
		}
		f.Size, f.SHA256 = counted.n, hex.EncodeToString(sum.Sum(nil))
		return nil
	})
	if err != nil {
		return File{}, fmt.Errorf("checkpoint: %w", err)
	}
	return f, nil
}

// encode writes the content of the part's file.
func (p *Part) encode(w io.Writer) error {
	names := append([]string{params}, rules[p.Rule]...)
	var infos []safetensors.Info
	for _, r := range p.ranges() {
		for _, name := range names {
			infos = append(infos, safetensors.Info{Name: tensor(r, name), Shape: []int{r.Hi - r.Lo}})
		}
	}
	out, err := safetensors.NewWriter(w, map[string]string{
		"job":  p.Job,
		"step": strconv.Itoa(p.Step),
		"plan": fmt.Sprintf("%d.%d", p.Plan.Generation, p.Plan.N),
		"rule": p.Rule,
	}, infos)
	if err != nil {
		return err
	}
	for _, s := range p.Shards {
		for _, x := range append([][]float32{s.Params}, s.Moments...) {
			if err := out.Write(x); err != nil {
				return err
			}
		}
	}
	return out.Close()
}

// counter counts what is written, rests between pieces, and stops when ctx is done.
type counter struct {
	ctx  context.Context
	w    io.Writer
	rest func(written int64) // nil for none
	n    int64
}

const pieceBytes = 4 << 20

func (c *counter) Write(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.w.Write(b)
	was := c.n
	if c.n += int64(n); c.rest != nil && c.n/pieceBytes > was/pieceBytes {
		c.rest(c.n)
	}
	return n, err
}

// Commit makes the files that the manifest names a checkpoint of the run directory dir, and returns once that is
// on disk. They must be there with their sizes, unless other hosts have them; if not, the error is an [*Error].
func Commit(dir string, m Manifest) error { return commit(openDisk, dir, m) }

func commit(open opener, dir string, m Manifest) error {
	b, err := m.Encode()
	if err != nil {
		return err
	}
	step, err := createStep(open, dir, m.Step)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	defer step.Close()
	for _, f := range m.Files {
		if err := check(step, m.Step, f); err != nil {
			return err
		}
	}
	if err := replace(step, manifestName, 0, func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// A disk is a directory as writing and pruning checkpoints use it; tests inject faults behind it. Names are below the directory.
type disk interface {
	MkdirAll(name string, perm fs.FileMode) error
	Create(name string, size int64) (file, error) // a new file, with room for size bytes where the file system can reserve it
	Rename(from, to string) error
	Remove(name string) error
	RemoveAll(name string) error
	ReadDir(name string) ([]fs.DirEntry, error)
	Sync(name string) error // of a directory
	Lstat(name string) (fs.FileInfo, error)
	Enter(name string) (disk, error)
	Close() error
}

type file interface {
	io.WriteCloser
	Sync() error
}

type opener func(dir string) (disk, error)

// rootDisk is the real one.
type rootDisk struct{ *os.Root }

func openDisk(dir string) (disk, error) {
	root, err := rundir.OpenRoot(dir)
	return rootDisk{root}, err
}

func (d rootDisk) Enter(name string) (disk, error) {
	root, err := rundir.EnterRoot(d.Root, name)
	return rootDisk{root}, err
}

func (d rootDisk) Create(name string, size int64) (file, error) {
	f, err := d.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := platform.Allocate(f, size); platform.IsFull(err) {
		return nil, errors.Join(err, f.Close(), d.Remove(name))
	}
	return &flowing{File: f}, nil
}

// flowing is a file that goes to the disk while it is written, and not all at once in the end, which holds others up.
type flowing struct {
	*os.File
	written, flows int64 // bytes, and those of them that go to the disk
}

func (f *flowing) Write(b []byte) (int, error) {
	n, err := f.File.Write(b)
	if f.written += int64(n); f.written-f.flows >= pieceBytes {
		platform.StartWriteback(f.File, f.flows, f.written-f.flows)
		f.flows = f.written
	}
	return n, err
}

func (d rootDisk) ReadDir(name string) ([]fs.DirEntry, error) { return rundir.ReadRoot(d.Root, name) }

func (d rootDisk) Sync(name string) error {
	dir, err := d.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// createStep makes the directory of a step's checkpoint, on disk, and opens it.
func createStep(open opener, dir string, step int) (disk, error) {
	run, err := open(dir)
	if err != nil {
		return nil, err
	}
	defer run.Close()
	name := stepDir(step)
	if err := run.MkdirAll(name, 0o700); err != nil {
		return nil, err
	}
	for _, parent := range []string{".", folder} {
		if err := run.Sync(parent); err != nil {
			return nil, err
		}
	}
	return run.Enter(name)
}

// openStep opens the directory of a step's checkpoint.
func openStep(dir string, step int) (*os.Root, error) {
	root, err := rundir.OpenRoot(filepath.Join(dir, filepath.FromSlash(stepDir(step))))
	if err != nil {
		return nil, unreadable(stepDir(step), err)
	}
	return root, nil
}

// size returns the bytes of all numbers.
func (p *Part) size() (bytes int64) {
	for _, s := range p.Shards {
		bytes += 4 * int64(len(s.Params)) * int64(1+len(s.Moments))
	}
	return bytes
}

// replace writes a file of a directory so that it appears under its name, in place of one that may be there, only when it is
// complete and on disk. The disk must have size bytes for it.
func replace(dir disk, name string, size int64, write func(io.Writer) error) error {
	f, temp, err := createTemp(dir, name, size)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = dir.Rename(temp, name)
	}
	if err != nil {
		dir.Remove(temp) //nolint:errcheck // a leftover is no file of the checkpoint, and pruned
		return err
	}
	return dir.Sync(".")
}

// createTemp makes a new file that only its maker writes: two writers of one manifest must not share it.
func createTemp(dir disk, name string, size int64) (f file, temp string, err error) {
	for i := 0; ; i++ {
		temp = fmt.Sprintf(".%s.%d.%d%s", name, os.Getpid(), i, tempSuffix)
		if f, err = dir.Create(temp, size); !errors.Is(err, fs.ErrExist) {
			return f, temp, err
		}
	}
}
