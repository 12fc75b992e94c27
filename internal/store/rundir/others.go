package rundir

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Where every host of a run has a run directory of its own, the leader gathers at the end of the run what the workers of all hosts have
// printed, and every host keeps a copy of that: a text that people can read, too.

const othersLog = "log/others.log"

// Bounds of Others.
const (
	MaxOthers  = 1 << 20 // bytes of all texts: the run ends when every host has them
	maxNotes   = 1 << 12
	maxHeading = 1 << 10 // bytes of a line between texts
)

// Others are the ends of the logs of workers on all hosts.
type Others struct {
	Logs  []OtherLog
	Notes []string // why logs are missing, in lines
}

// OtherLog is the end of the log of one incarnation of a worker.
type OtherLog struct {
	Host                string
	Worker, Incarnation int
	From                int64 // byte of the log with which Text begins
	Text                []byte
}

var otherHeading = regexp.MustCompile(`^==> (.+) worker-(\d+)\.(\d+)\.log, bytes (\d+) to (\d+) <==$`)

// WriteOthers writes the logs of all hosts.
func WriteOthers(dir string, o Others) error {
	var text bytes.Buffer
	for _, n := range o.Notes[:min(len(o.Notes), maxNotes)] {
		fmt.Fprintf(&text, "==> %s <==\n", heading(n))
	}
	for _, l := range o.Logs {
		fmt.Fprintf(&text, "==> %s worker-%d.%d.log, bytes %d to %d <==\n", heading(l.Host), l.Worker, l.Incarnation, l.From, l.From+int64(len(l.Text)))
		text.Write(l.Text)
		text.WriteByte('\n')
	}
	return WriteFile(filepath.Join(dir, othersLog), text.Bytes())
}

// heading returns what stands in a line between texts.
func heading(s string) string {
	s = cmp.Or(strings.Join(strings.Fields(s), " "), "?")
	return s[:min(len(s), maxHeading/2)]
}

// ReadOthers returns the logs of all hosts, none if they were not gathered.
func ReadOthers(dir string) (o Others, err error) {
	path := filepath.Join(dir, othersLog)
	text, err := readAtMost(path, maxWhole)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err != nil {
		return o, err
	}
	size := len(text)
	for len(text) > 0 {
		bad := fmt.Errorf("%s: byte %d is not the beginning of a log", path, size-len(text))
		line, _, ok := bytes.Cut(text[:min(len(text), maxHeading)], []byte("\n"))
		if !ok {
			return o, bad
		}
		text = text[len(line)+1:]
		m := otherHeading.FindStringSubmatch(string(line))
		if m == nil {
			note, begins := strings.CutPrefix(string(line), "==> ")
			note, ends := strings.CutSuffix(note, " <==")
			if !begins || !ends {
				return o, bad
			}
			o.Notes = append(o.Notes, note)
			continue
		}
		l := OtherLog{Host: m[1]}
		var to int64
		var errs [4]error
		l.Worker, errs[0] = strconv.Atoi(m[2])
		l.Incarnation, errs[1] = strconv.Atoi(m[3])
		l.From, errs[2] = strconv.ParseInt(m[4], 10, 64)
		to, errs[3] = strconv.ParseInt(m[5], 10, 64)
		if errors.Join(errs[:]...) != nil || to < l.From || to-l.From >= int64(len(text)) || text[to-l.From] != '\n' {
			return o, bad
		}
		l.Text, text = text[:to-l.From], text[to-l.From+1:]
		o.Logs = append(o.Logs, l)
	}
	return o, nil
}
