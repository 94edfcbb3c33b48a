// A modal dialog with a title. Escape and its button close it, and the focus goes back to where it was.
import {useId, useLayoutEffect, useRef} from "preact/hooks";

export function Dialog({title, onClose, children}) {
  const element = useRef(null), heading = useId();
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return <dialog ref={element} aria-labelledby={heading} onClose={onClose}>
    <div class="line tight"><h2 id={heading}>{title}</h2><button type="button" onClick={onClose}>Close</button></div>
    {children}
  </dialog>;
}
