package rundir

import "os"

// MakeBin makes the folder for the program's executable, which Close removes with all
// that is in it.
func (d *Dir) MakeBin() (path string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	path = d.File("bin")
	if d.again { // of a run that was killed
		if err := os.RemoveAll(path); err != nil {
			return "", err
		}
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", err
	}
	d.bin = true
	return path, nil
}

// MakeStore makes the folder for the log of the agreement. It stays with the run.
func (d *Dir) MakeStore() (path string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	path = d.File("agreement")
	if d.again {
		return path, os.MkdirAll(path, 0o700)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", err
	}
	d.own = append(d.own, "agreement")
	return path, nil
}

// FirstValues is where in a run directory the first values of a Python program are: the file FirstName of the folder that MakeFirst makes.
const (
	FirstValues = "first/" + FirstName
	FirstName   = "values.pt"
)

// MakeFirst returns the folder for the first values of a Python program, which it makes if it is not there. It stays with the run.
func (d *Dir) MakeFirst() (path string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	path = d.File("first")
	if !d.again {
		d.own = append(d.own, "first")
	}
	return path, os.MkdirAll(path, 0o700)
}

// makeLog makes the folder of logs if it is not there, and reports whether something else was in its place, which is kept.
func (d *Dir) makeLog() (moved bool, err error) {
	log := d.File("log")
	if info, err := os.Stat(log); err == nil && !info.IsDir() {
		if err := os.Rename(log, log+badSuffix); err != nil {
			return false, err
		}
		moved = true
	}
	return moved, os.MkdirAll(log, 0o700)
}
