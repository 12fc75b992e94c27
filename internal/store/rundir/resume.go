package rundir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Resume takes over a run directory whose run has ended, however it did, and
// returns what it says of it. Whole files are replaced as new ones come, line files grow on. The
// error is one of [ErrNoRun] and [ErrInUse], wrapped, or about a file.
func Resume(path string) (*Dir, Record, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, Record{}, err
	}
	if target, err := filepath.EvalSymlinks(abs); err == nil {
		abs = target // such as runs/latest, which may come to point elsewhere
	}
	d := &Dir{path: abs, shown: filepath.Clean(path), again: true}
	d.setParent()
	if d.lock, err = openFile(d.File("lock"), os.O_RDWR); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, Record{}, fmt.Errorf("%s %w: give the directory of a run, such as %s", path, ErrNoRun, filepath.Join(Parent, Latest))
	} else if err != nil {
		return nil, Record{}, fmt.Errorf("%s: lock: %w", path, cause(err))
	}
	if err := lockFile(d.lock); err != nil {
		_ = d.lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, Record{}, fmt.Errorf("%s %w, or by this one, which is still under way", path, ErrInUse)
		}
		return nil, Record{}, fmt.Errorf("%s: lock: %w", path, err)
	}
	if err := tighten(abs); err != nil {
		return nil, Record{}, errors.Join(fmt.Errorf("%s: %w", path, cause(err)), d.lock.Close())
	}
	notes, err := d.clean()
	var r Record
	if err == nil {
		r, err = Read(abs)
	}
	r.Path, r.Running, r.Job, r.Notes = d.shown, false, r.Job.Plain(), notes
	if err != nil {
		return nil, r, errors.Join(err, d.Close())
	}
	return d, r, nil
}

// clean removes what a killed run has left of its processes, and moves aside what cannot be read and is not needed. It says so in a
// sentence each.
func (d *Dir) clean() (notes []string, err error) {
	if err := os.Remove(d.File(workersName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // the processes that it lists may be others by now
	}
	FreeReserve(d.path)
	d.forgetLeaders() // a run without its agreement may count generations from 1 again
	if notes, err = d.setAside(); err != nil {
		return notes, err
	}
	if _, broken := readOptional[Summary](d.File("summary.json")); broken != nil {
		if err := os.Rename(d.File("summary.json"), d.File("summary.json"+badSuffix)); err != nil {
			return notes, err
		}
		notes = append(notes, fmt.Sprintf("%v; it was moved to summary.json%s", broken, badSuffix))
	}
	if moved, err := d.makeLog(); err != nil {
		return notes, err
	} else if moved {
		notes = append(notes, "log is no folder; it was moved to log"+badSuffix)
	}
	return notes, nil
}

// ReadData reads data.json.
func (d *Dir) ReadData() (files []DataFile, err error) {
	found, err := readJSON(d.File("data.json"), &files)
	if err == nil && !found {
		err = fmt.Errorf("%s: %w", d.File("data.json"), fs.ErrNotExist)
	}
	return files, err
}

// continueRun is WriteJob of a resumed run.
func (d *Dir) continueRun(job Job, data []DataFile) error {
	if err := d.openLines(d.continueLines); err != nil {
		return err
	}
	if err := d.rewriteJob(job, data); err != nil {
		return err
	}
	if err := os.Remove(d.File("summary.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.isRun = true
	d.setReserve(job)
	return errors.Join(d.hold(), d.link())
}

// rewriteJob writes data.json and job.json where the run is resumed as another job, or from another place. Data come first: after a
// crash between the two, the job in job.json is still the one whose state there is.
func (d *Dir) rewriteJob(job Job, data []DataFile) error {
	var was Job
	found, err := readJSON(d.File("job.json"), &was)
	if err != nil {
		return err
	}
	if found {
		job.Started = was.Started
	}
	if files, err := d.ReadData(); err != nil || !slices.Equal(files, data) {
		if err := d.writeData(data); err != nil {
			return err
		}
	}
	if found && was.Plain().ID() == job.Plain().ID() && was.Dir == job.Dir && was.Command == job.Command && slices.Equal(was.Args, job.Args) {
		return nil
	}
	return d.writeJSON("job.json", job)
}

// continueLines opens a line file to write to its end.
func (d *Dir) continueLines(name string) (*os.File, error) {
	f, err := openFile(d.File(name), os.O_CREATE|os.O_RDWR|os.O_APPEND)
	if err != nil {
		return nil, err
	}
	if err := dropPart(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
