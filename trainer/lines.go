package trainer

import (
	"errors"
	"fmt"
	"strings"
)

// LineWriter writes a file of lines from [Job.OnStep], each exactly once, whatever
// happens to the run: workers that die, rollbacks, and resuming. The run
// records how long the file is with each call of OnStep that has returned. A process
// that makes the calls from then on cuts the file off there before it writes, so that
// nothing is left of a call that was interrupted. A new run begins with an empty file.
//
// The file must be the same one on all hosts of the run, and only the run may write to
// it. What a line says has to follow from the StepInfo, as it may be
// written again.
type LineWriter struct {
	// Path names the file. A relative path begins at the working directory.
	Path string

	// Header is the first line of the file, without its end; "" means none.
	Header string
}

// Printf appends a line, without its end, as [fmt.Sprintf] makes it. It is called in OnStep,
// with the StepInfo of that call. Its error ends the run even if OnStep does not
// return it.
func (w LineWriter) Printf(s StepInfo, format string, args ...any) error {
	if s.lines == nil {
		return errors.New("trainer: LineWriter.Printf outside of OnStep")
	}
	header := w.Header
	if header != "" {
		header = line(header)
	}
	return s.lines.Write(w.Path, header, line(fmt.Sprintf(format, args...)))
}

// line ends a text with one line end.
func line(text string) string { return strings.TrimSuffix(text, "\n") + "\n" }
